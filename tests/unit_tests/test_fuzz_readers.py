"""Files that are damaged at random: whatever reads them reads them or says which file is wrong, and nothing else happens.

The damage is drawn from a seed, the same in every run; ``BLOCKGROW_EXAMPLES=2000`` damages each kind so often.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents.records import open_tokenizer
from blockgrow_titan.documents.source import DocumentSource
from blockgrow_titan.growth.manifest import (
    FILE_NAME,
    DataIdentity,
    build_manifest,
    check_config,
    check_data,
    read_manifest,
    write_manifest,
)
from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.model.model import BlockStackModel
from blockgrow_titan.parse import parse_config, read_toml
from blockgrow_titan.paths import read_json_object
from blockgrow_titan.teacher.files import CONFIG, DCP_METADATA, INDEX, open_teacher
from tests.unit_tests.document_kinds import TEXTS, build, make_tokenizer, write_jsonl, write_parquet
from tests.unit_tests.jobs import arguments
from tests.unit_tests.preparing import SHARD, ahead, on_the_fly, prepare, write_documents
from tests.unit_tests.tiny_teachers import convert_teachers, make_teachers

EXAMPLES = int(os.environ.get("BLOCKGROW_EXAMPLES", "0"))


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Some bytes changed, cut off, taken out, put in or repeated."""
    place = rng.randrange(len(content) + 1)
    length = min(rng.choice([1, 1, 2, 8, 100]), len(content) - place)
    match rng.randrange(6):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + content[place + length :]
        case 2:
            return content[:place] + rng.randbytes(length) + content[place:]
        case 3:
            return content[:place] + content[place : place + length] * 2 + content[place + length :]
        case 4:  # letters of the file itself: digits, braces and quotes where they do not belong
            return content[:place] + bytes(rng.choices(content, k=length)) + content[place + length :]
        case _:
            changed = bytearray(content)
            for at in rng.choices(range(len(content)), k=rng.choice([1, 1, 3, 20])):
                changed[at] ^= 1 << rng.randrange(8)
            return bytes(changed)


def damages(path: Path, examples: int, seed: int = 0) -> Iterator[None]:
    """Damage a file again and again, each time from its whole content; it is whole again at the end."""
    whole, rng = path.read_bytes(), random.Random(seed)
    try:
        for _ in range(EXAMPLES or examples):
            path.write_bytes(damaged(rng, whole))
            yield
    finally:
        path.write_bytes(whole)


def refused_or_read(read: Callable[[], Any], name: str) -> Any:
    """What was read, or None if it was refused in one line with this name in it."""
    try:
        return read()
    except (ValueError, NotImplementedError) as error:
        assert name in str(error), f"{name} is not in: {error}"
        return None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def check_documents(source: DocumentSource, seq_len: int, vocab_size: int, name: str) -> int:
    """Read every document; how many could be."""
    read = 0
    for i in range(len(source)):
        ids = refused_or_read(lambda i=i: source[i], name)
        length = refused_or_read(lambda i=i: source.length(i), name)
        if ids is not None:
            assert 1 <= len(ids) <= seq_len and all(0 <= token < vocab_size for token in ids)
            assert length is None or length >= 1
            read += 1
    return read


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_jsonl(tokenizer: HuggingFaceTokenizer, tmp_path: Path, policy: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    vocab_size, outcomes = tokenizer.get_vocab_size(), set()
    for _ in damages(path, 100):
        source = refused_or_read(lambda: build("jsonl", path, tokenizer, seq_len=40, on_bad_document=policy), "a.jsonl")
        outcomes.add(source is not None and check_documents(source, 40, vocab_size, "a.jsonl"))
    assert {False, 5, 6} <= outcomes


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_parquet(tokenizer: HuggingFaceTokenizer, tmp_path: Path, policy: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", TEXTS, row_group_size=2)
    vocab_size, outcomes = tokenizer.get_vocab_size(), set()
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // (EXAMPLES or 20))):  # a download that broke off
        path.write_bytes(whole[:size])
        source = refused_or_read(
            lambda: build("parquet", path, tokenizer, seq_len=40, on_bad_document=policy), "a.parquet"
        )
        outcomes.add(source is not None and check_documents(source, 40, vocab_size, "a.parquet"))
    assert outcomes == {False}


@pytest.fixture(scope="module")
def prepared(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fineweb = write_documents(workspace, tmp_path_factory.mktemp("fineweb"))
    return prepare(workspace, tmp_path_factory.mktemp("prepared") / "out", on_the_fly(fineweb))


@pytest.mark.parametrize("file", ["dataset.json", "00000.ids", "00001.offsets", "00002.digests"])
def test_pretokenized(workspace: Path, prepared: Path, file: str) -> None:
    tokenizer, folder = HuggingFaceTokenizer(str(workspace / "tokenizer")), prepared / "train"
    held_out = ahead(prepared)["documents__held_out_documents"]
    vocab_size, outcomes = tokenizer.get_vocab_size(), set()
    for _ in damages(folder / file, 40):
        source = refused_or_read(
            lambda: build("pretokenized", folder, tokenizer, seq_len=24, held_out_documents=held_out), str(prepared)
        )
        if source is not None:
            assert len(refused_or_read(source.identity, str(prepared))["digest"]) in (64, 0)
        outcomes.add(source is not None and check_documents(source, 24, vocab_size, str(prepared)))
    assert False in outcomes and (SHARD in outcomes or file == "dataset.json")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = make_teachers(tmp_path_factory.mktemp("teachers"))
    converted = convert_teachers({"tied": made["tied"]}, tmp_path_factory.mktemp("converted"))
    return {"tied": made["tied"][0], "files": made["sharded_files"][0], "converted": converted["tied"]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("tied", CONFIG),
        ("tied", "model.safetensors"),
        ("files", INDEX),
        ("files", "model-00001-of-*.safetensors"),
        ("converted", DCP_METADATA),
        ("converted", "__0_0.distcp"),
    ],
)
def test_teachers(teachers: dict[str, Path], kind: str, file: str) -> None:
    (path,) = teachers[kind].glob(file)

    def read_all() -> list[torch.Tensor]:
        files = open_teacher(str(path.parent))
        try:
            return [files.embedding(), files.head(), files.final_norm(), *map(files.read, files.names())]
        finally:
            files.close()

    outcomes = set()
    for _ in damages(path, 20):
        tensors = refused_or_read(read_all, str(path.parent))
        outcomes.add(tensors is not None)
        assert tensors is None or all(tensor.isfinite().all() for tensor in tensors)
    assert False in outcomes


@pytest.mark.parametrize("name", ["tied", "files", "converted"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half"])
def test_each_file_of_a_teacher_in_turn(teachers: dict[str, Path], tmp_path: Path, name: str, damage: str) -> None:
    """All but what only generation needs are missed."""
    for number, file in enumerate(sorted(path.name for path in teachers[name].iterdir())):
        folder = Path(shutil.copytree(teachers[name], tmp_path / str(number)))
        content = (folder / file).read_bytes()
        (folder / file).unlink()
        if damage != "missing":
            (folder / file).write_bytes(content[: len(content) // 2 if damage == "half" else 0])

        read = refused_or_read(lambda folder=folder: open_teacher(str(folder)).embedding(), str(folder))
        assert (read is not None) == (file == "generation_config.json"), file


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(workspace: Path, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer"))
    outcomes = set()
    for _ in damages(folder / file, 40):
        outcomes.add(refused_or_read(lambda: open_tokenizer(str(folder), "model.hf_assets_path"), str(folder)) is None)
    assert outcomes == {True, False}


def test_manifests(workspace: Path, tmp_path: Path) -> None:
    job_config = parse_config(arguments(workspace, tmp_path))
    args = FLAVORS["toy"]
    args.update_from_config(job_config)
    data: DataIdentity = {"training": {"documents": 40, "digest": "a" * 64}}
    manifest = build_manifest(job_config, schedule_of(job_config), args, BlockStackModel, data)
    folder = str(tmp_path / "step-2")
    write_manifest(folder, manifest)

    def read() -> dict[str, Any]:
        saved = read_manifest(folder)
        check_config(saved, job_config, folder)
        check_data(saved, data, folder)
        return saved

    outcomes = set()
    for _ in damages(tmp_path / "step-2" / FILE_NAME, 100):
        outcomes.add(refused_or_read(read, folder) is None)
    assert outcomes == {True, False}


def test_json_and_toml(workspace: Path, tmp_path: Path) -> None:
    """What every other file of the two kinds is read with."""
    for source, read in (
        (workspace / "teacher" / CONFIG, lambda path: read_json_object(path, "mend it")),
        (workspace / "base.toml", read_toml),
    ):
        path = Path(shutil.copy(source, tmp_path / source.name))
        outcomes = set()
        for _ in damages(path, 100):
            outcomes.add(refused_or_read(lambda path=path, read=read: read(str(path)), path.name) is None)
        assert outcomes == {True, False}
