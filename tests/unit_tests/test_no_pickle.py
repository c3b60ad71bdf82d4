"""Files that users exchange run no code when they are read: the source calls nothing that unpickles without a limit."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FILES = sorted([*(REPOSITORY / "blockgrow_titan").rglob("*.py"), *(REPOSITORY / "tools").rglob("*.py")])
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas"}
# An unpickler that knows a checkpoint's classes only is made here, and torch's reader of .metadata gets it.
CHECKPOINT_IO = "blockgrow_titan/checkpoint_io.py"
# The command whose purpose is to load an exported folder as its users will, its modelling file included.
VERIFY = "blockgrow_titan/hf/verify.py"


def keyword(call: ast.Call, name: str) -> object:
    """The constant that a call gives for a keyword; None if it gives none."""
    values = [k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)]
    return values[0] if values else None


def dangers(source: str) -> Iterator[str]:
    """What in a source file can run code from a file that it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import) and "FileSystemReader" in [name.name for name in node.names]:
            yield "FileSystemReader"
        if not isinstance(node, ast.Call):
            continue
        if keyword(node, "trust_remote_code"):
            yield "trust_remote_code"
        if keyword(node, "allow_pickle"):
            yield "allow_pickle"
        function = ast.unparse(node.func)
        if function in ("eval", "exec"):
            yield function
        module, _, name = function.rpartition(".")
        if module in UNPICKLERS and name in ("load", "loads", "Unpickler", "open", "read_pickle"):
            yield function
        if function == "torch.load" and keyword(node, "weights_only") is not True:
            yield function


def test_nothing_unpickles_without_a_limit() -> None:
    found = {str(path.relative_to(REPOSITORY)): set(dangers(path.read_text())) for path in FILES}
    assert len(found) > 100
    assert {name: calls for name, calls in found.items() if calls} == {
        CHECKPOINT_IO: {"FileSystemReader"},
        VERIFY: {"trust_remote_code"},
    }


def test_what_is_found() -> None:
    source = """
import pickle
from torch.distributed.checkpoint import FileSystemReader
pickle.load(file)
np.load(path, allow_pickle=True)
torch.load(path)
torch.load(path, weights_only=False)
torch.load(path, weights_only=True)
AutoModel.from_pretrained(path, trust_remote_code=True)
model.eval()
eval(text)
"""
    assert sorted(dangers(source)) == [
        "FileSystemReader",
        "allow_pickle",
        "eval",
        "pickle.load",
        "torch.load",
        "torch.load",
        "trust_remote_code",
    ]
