"""The Python file that goes with an exported student, and the check that it is the whole model.

``modeling_source`` is the template ``modeling_block_stack.py`` with the source of the placement's own classes put in: what
ran in training is what runs in transformers. ``check_model`` imports the result, builds it on the meta device, compares
names and shapes with the tensors to be written, and lets a tiny model of it generate, so that a placement which needs
anything from outside its class, or a KV cache of its own, is refused here and not by whoever loads the folder.
"""

import ast
import builtins
import dis
import importlib.util
import inspect
import sys
import tempfile
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockgrow_titan.hf import modeling_block_stack as template
from blockgrow_titan.model.placement import DecoderLayer

TEMPLATE = Path(template.__file__)
MODELING_FILE = TEMPLATE.name
MODEL_TYPE = "qwen3_block_stack"
ARCHITECTURE = "BlockStackForCausalLM"
AUTO_MAP = {
    "AutoConfig": f"{TEMPLATE.stem}.BlockStackConfig",
    "AutoModel": f"{TEMPLATE.stem}.BlockStackModel",
    "AutoModelForCausalLM": f"{TEMPLATE.stem}.{ARCHITECTURE}",
}
_MARK = "StudentLayer = DecoderLayer"
_LAZY = "from __future__ import annotations\n"  # as the template has it: annotations are not looked up
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
_AVAILABLE = {"torch", "transformers", *sys.stdlib_module_names}
_IN_A_CLASS_BODY = {"__name__", "__module__", "__qualname__"}


def modeling_source(layer_cls: type[DecoderLayer], name: str) -> str:
    """The modelling file for a placement.

    Args:
        layer_cls: The placement's class; every class between it and ``DecoderLayer`` goes into the file.
        name: The placement's name, for errors.

    Raises:
        ValueError: If the source of a class is not available, or it is not self-contained.
    """
    classes = [cls for cls in reversed(layer_cls.__mro__) if cls not in DecoderLayer.__mro__]
    text = TEMPLATE.read_text(encoding="utf-8")
    before, mark, after = text.partition(_MARK)
    assert mark, f"{TEMPLATE} has lost the line that a placement replaces"
    taken = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    for cls in classes:
        if cls.__name__ in taken:
            raise _refused(
                name, f"two classes of the exported file would be called {cls.__name__}; rename the placement's"
            )
        taken.add(cls.__name__)
    _check_names(classes, name)
    placed = "\n\n\n".join(_class_source(cls, name) for cls in classes)
    rest = after.partition("\n")[2]  # without the mark's comment
    return f"{before}{placed}\n\n\nStudentLayer = {layer_cls.__name__}\n{rest}"


class NotExportable(ValueError):
    """A placement whose exported file would not be the model that was trained."""


def _refused(name: str, why: str) -> NotExportable:
    return NotExportable(f'placement "{name}" cannot be exported: {why}')


def _class_source(cls: type, name: str) -> str:
    """A class's source without decorators, its bases by their plain names."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise _refused(name, f"the source of {cls.__name__} is not available ({error}); define it in a file") from error
    assert isinstance(node, ast.ClassDef)
    header = f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}):"
    if node.body[0].lineno == node.lineno:  # all on one line
        return f"{header}\n{textwrap.indent(ast.unparse(ast.Module(node.body, [])), '    ')}"
    first = min([node.body[0].lineno, *(d.lineno for d in getattr(node.body[0], "decorator_list", []))])
    return "\n".join([header, *source.splitlines()[first - 1 :]]).rstrip()


def _check_names(classes: list[type], name: str) -> None:
    """Every global name that the placement's code uses must be in the file, and mean the same there."""
    exported = {cls.__name__ for cls in classes} | {DecoderLayer.__name__}
    for cls in classes:
        theirs = sys.modules[cls.__module__].__dict__
        code = compile(_LAZY + _class_source(cls, name), cls.__name__, "exec")
        for package in sorted(_used(code, "IMPORT_NAME")):
            if package.partition(".")[0] not in _AVAILABLE:
                raise _refused(
                    name, f"{cls.__name__} imports {package}; whoever loads the file has torch and transformers"
                )
        for used in sorted(_used(code, "LOAD_GLOBAL", "LOAD_NAME") - exported):
            ours = getattr(template, used, getattr(builtins, used, None))
            if ours is None:
                raise _refused(
                    name,
                    f"{cls.__name__} uses {used}, which is defined outside the class; make it a method, or import it inside "
                    "the method that uses it",
                )
            if theirs.get(used, ours) is not ours:
                raise _refused(
                    name, f"{cls.__name__} uses {used}, which the exported file has with another meaning; rename it"
                )


def _used(code: types.CodeType, *operations: str) -> set[str]:
    """Names that these operations of the code take from outside it, nested functions and classes included."""
    instructions = list(dis.get_instructions(code))
    stored = {i.argval for i in instructions if i.opname == "STORE_NAME"} | _IN_A_CLASS_BODY
    names = {i.argval for i in instructions if i.opname in operations} - stored
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _used(constant, *operations)
    return names


@contextmanager
def imported(source: str) -> Iterator[types.ModuleType]:
    """The module of an exported file, importable while the context lasts; transformers looks classes up by it."""
    name = f"_exported_{TEMPLATE.stem}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MODELING_FILE
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            yield module
        finally:
            del sys.modules[name]


def check_model(config: dict[str, Any], source: str | None, shapes: dict[str, torch.Size], name: str) -> None:
    """Refuse a folder that transformers could not load or run.

    Args:
        config: Content of ``config.json``.
        source: The modelling file's text; None for a plain Qwen3.
        shapes: Hugging Face name -> shape of every tensor that the folder will hold.
        name: The placement's name, for errors.

    Raises:
        ValueError: If the model cannot be built or run, or its tensors are not these.
    """
    if source is None:
        _check_tensors(Qwen3Config(**config), Qwen3ForCausalLM, shapes, name)
        return
    try:
        with imported(source) as module:
            _check_tensors(module.BlockStackConfig(**config), module.BlockStackForCausalLM, shapes, name)
            _check_cache(module.BlockStackConfig(**(config | _TINY)), module.BlockStackForCausalLM, name)
    except NotExportable:
        raise
    except Exception as error:  # a placement's own code
        raise _refused(name, f"its code fails in the exported file ({type(error).__name__}: {error})") from error


def _check_tensors(
    config: Qwen3Config, model_cls: type[Qwen3ForCausalLM], shapes: dict[str, torch.Size], name: str
) -> None:
    """The model, built on the meta device, has exactly these tensors."""
    with torch.device("meta"):
        model = model_cls(config)
    wanted = {key: tensor.shape for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    if wanted != shapes:
        different = sorted(n for n in wanted.keys() | shapes if wanted.get(n) != shapes.get(n))
        raise _refused(
            name,
            f"the exported model and the checkpoint differ in {len(different)} tensors, such as {different[0]}: "
            f"{_shape(wanted.get(different[0]))} there, {_shape(shapes.get(different[0]))} in the checkpoint",
        )
    lost = [
        f"{key}.{part}"
        for key, module in model.named_modules()
        if ".layers." in key
        for part, value in [*module.__dict__.items(), *module._buffers.items()]
        if isinstance(value, torch.Tensor) and f"{key}.{part}" not in wanted
    ]
    if lost:
        raise _refused(
            name, f"{lost[0]} is a tensor that files do not hold; make it a parameter or a persistent buffer"
        )


@torch.no_grad()
def _check_cache(config: Qwen3Config, model_cls: type[Qwen3ForCausalLM], name: str) -> None:
    """A tiny model of the same depth says the same token by token, with a cache, as it says of the whole text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_cls(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    ids = torch.arange(2)[None]  # (1, 2)
    logits = model(input_ids=ids, use_cache=False).logits
    if logits.shape != (1, 2, config.vocab_size):
        raise _refused(
            name, f"place, enter and leave must keep the shape of h; logits came out as {list(logits.shape)}"
        )
    steps = model.generate(
        input_ids=ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    whole = model(input_ids=steps.sequences, use_cache=False).logits[0, 1:-1]  # (4, V)
    if (torch.cat(steps.logits) - whole).abs().max() > 1e-3 * whole.abs().max():
        raise _refused(
            name,
            "its logits with the KV cache differ from those without: place must call attend once, and treat every position "
            "alone otherwise",
        )


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else f"shape {tuple(shape)}"
