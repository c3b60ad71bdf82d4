"""FineWeb-Edu: held out and trained on are disjoint, a larger shard goes on to fresh documents, the hub is real code."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.checks import check_config
from blockgrow_titan.documents.source import DocumentSource
from blockgrow_titan.documents.tables import ParquetReader
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.parse import parse_config
from tests.unit_tests.document_kinds import FINEWEB_COLUMNS, build, fineweb_id, make_tokenizer, write_fineweb
from tests.unit_tests.jobs import arguments

ROWS, HELD_OUT = 23, 5
TEXTS = [f"document number {i}" for i in range(ROWS)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of row groups of 4; the held-out set ends inside the second row group."""
    return write_fineweb(tmp_path_factory.mktemp("fineweb"), TEXTS, file_ends=(7, 12), row_group_size=4)


def opened(path: Path | str, tokenizer: HuggingFaceTokenizer, split: str, **kwargs: Any) -> DocumentSource:
    field = "training.dataset_path" if split == "train" else "validation.dataset_path"
    kwargs = {"held_out_documents": HELD_OUT, **kwargs}
    return build("fineweb_edu", path, tokenizer, split=split, field=field, **kwargs)


def texts_of(source: DocumentSource) -> list[str]:
    return [source.tokenizer.decode(ids[:-1]) for ids in source]


def ids_digest(rows: range) -> str:
    return hashlib.sha256("".join(f"{fineweb_id(i)}\n" for i in rows).encode()).hexdigest()


def test_the_files_are_of_its_schema(folder: Path) -> None:
    for file in folder.iterdir():
        schema = pyarrow.parquet.read_schema(file)
        assert dict(zip(schema.names, schema.types, strict=True)) == FINEWEB_COLUMNS


@pytest.mark.parametrize("shard", [-1, 1, 6, 7, ROWS - HELD_OUT])
def test_the_held_out_documents_come_first(folder: Path, tokenizer: HuggingFaceTokenizer, shard: int) -> None:
    """Whatever the shard: validation is rows 0 to H - 1, training document i is row H + i."""
    validation, training = (
        opened(folder, tokenizer, s, shard_documents=n) for s, n in (("validation", -1), ("train", shard))
    )
    assert texts_of(validation) == TEXTS[:HELD_OUT]
    count = shard if shard > 0 else ROWS - HELD_OUT
    assert texts_of(training) == TEXTS[HELD_OUT : HELD_OUT + count]
    assert validation.identity() == {"documents": HELD_OUT, "digest": ids_digest(range(HELD_OUT))}
    assert training.identity() == {"documents": count, "digest": ids_digest(range(HELD_OUT, HELD_OUT + count))}


def test_more_documents_are_fresh_ones(folder: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """The paper's longer joint controls: the same shard first, then rows that it never holds."""
    short, long = ([*opened(folder, tokenizer, "train", shard_documents=n)] for n in (6, 12))
    held_out = [*opened(folder, tokenizer, "validation")]
    assert long[:6] == short
    assert not any(ids in short or ids in held_out for ids in long[6:])


def test_no_held_out_documents(folder: Path, tokenizer: HuggingFaceTokenizer) -> None:
    assert texts_of(opened(folder, tokenizer, "train", held_out_documents=0)) == TEXTS


def test_only_the_ids_are_read_to_tell_the_data_apart(
    folder: Path, tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening reads the first text; the comparison of ids and the digest read each row group's ids once, no text."""
    read: list[tuple[int, str]] = []
    column = ParquetReader._column

    def counted(self: ParquetReader, group: int, name: str) -> pyarrow.ChunkedArray:
        if self._cached.get(name, (-1,))[0] != group:
            read.append((group, name))
        return column(self, group, name)

    monkeypatch.setattr(ParquetReader, "_column", counted)
    source = opened(folder, tokenizer, "train")
    assert read == [*((group, "id") for group in range(7)), (1, "text")]
    read.clear()
    source.identity()
    assert read == [(group, "id") for group in range(1, 7)]
    read.clear()
    # Ranks stride over the rows; each decodes a row group once (1: rank 0 has it already; 3: its one row is rank 0's).
    for rank, groups in ((0, [2, 3, 4, 5, 6]), (1, [1, 2, 4, 5, 6])):
        [source[i] for i in range(rank, len(source), 2)]
        assert read == [(group, "text") for group in groups]
        read.clear()


@pytest.mark.parametrize(
    ("split", "changes", "words"),
    [
        (
            "train",
            {"shard_documents": 19},
            "documents.shard_documents = 19 and documents.held_out_documents = 5 need 24 documents, but .* holds 23 "
            "documents: set documents.shard_documents to 18 at most",
        ),
        ("train", {"held_out_documents": 23}, "held_out_documents = 23, but training.* holds 23 .* from 1 to 22"),
        ("train", {"held_out_documents": 30, "shard_documents": 2}, "need 32 .* documents.shard_documents to 0 at most"),
        ("validation", {"held_out_documents": 24}, "held_out_documents = 24, but validation.* holds 23 .* from 1 to 23"),
        ("validation", {"held_out_documents": 0}, "documents.held_out_documents = 0, but validation.dataset_path"),
        ("train", {"text_column": "body"}, r'000_00000.parquet: there is no "body", which documents.text_column names'),
    ],
)  # fmt: skip
def test_refusals(folder: Path, tokenizer: HuggingFaceTokenizer, split: str, changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        opened(folder, tokenizer, split, **changes)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_id_is_required(tmp_path: Path, tokenizer: HuggingFaceTokenizer, split: str) -> None:
    write_fineweb(tmp_path, TEXTS, without=("id",))
    with pytest.raises(ValueError, match=r'000_00000.parquet: there is no "id", .* there are: text, dump, url'):
        opened(tmp_path, tokenizer, split)
    write_fineweb(tmp_path, TEXTS, ids=[float(i) for i in range(ROWS)])
    with pytest.raises(ValueError, match=r'"id" is of type double, .* a string or an integer'):
        opened(tmp_path, tokenizer, split)


def test_a_document_in_both_sets_is_refused(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    ids = [fineweb_id(i) for i in range(ROWS)]
    ids[14] = ids[3]
    write_fineweb(tmp_path, TEXTS, ids=ids, file_ends=(7, 12))
    with pytest.raises(ValueError) as error:
        opened(tmp_path, tokenizer, "train")
    assert f'training.dataset_path: id "{fineweb_id(3)}" is that of a held-out document and of' in str(error.value)
    assert f"{tmp_path / '002_00000.parquet'}, row 2, which would be trained on" in str(error.value)
    assert len(opened(tmp_path, tokenizer, "train", shard_documents=9)) == 9  # rows 5 to 13
    assert len(opened(tmp_path, tokenizer, "train", held_out_documents=3)) == 20


# The hub


@pytest.mark.parametrize("path", ["", "HuggingFaceFW/fineweb-edu"])
def test_hub_and_folder_give_the_same(
    folder: Path, tokenizer: HuggingFaceTokenizer, path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub's repository is a local folder of the same layout here; all else is ``datasets`` as it is."""
    import datasets

    write_fineweb(tmp_path / "hub" / "sample" / "10BT", TEXTS, file_ends=(7, 12), row_group_size=4)
    load, asked = datasets.load_dataset, []

    def load_dataset(name: str, sample: str, split: str) -> datasets.Dataset:
        asked.append((name, sample, split))
        files = str(tmp_path / "hub" / "sample" / "10BT" / "*.parquet")
        return load("parquet", data_files=files, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    for split in ("train", "validation"):
        hub, local = opened(path, tokenizer, split), opened(folder, tokenizer, split)
        assert [*hub] == [*local]
        assert hub.identity() == local.identity()
    assert set(asked) == {("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")}
    assert hub.reader.where(2) == "HuggingFaceFW/fineweb-edu, sample-10BT, row 2"


def test_without_the_hub(tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub

    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ValueError) as error:
        opened("", tokenizer, "train")
    text = str(error.value)
    assert text.startswith('training.dataset_path = "": HuggingFaceFW/fineweb-edu cannot be loaded from the hub (')
    assert 'hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include "sample/10BT/*" --local-dir' in text
    assert "set training.dataset_path to FOLDER" in text and "\n" not in text


# The config


@pytest.fixture(scope="module")
def job_config(workspace: Path, folder: Path) -> JobConfig:
    names = {f"{section}__dataset": "fineweb_edu" for section in ("training", "validation")}
    paths = {f"{name}_path": str(folder) for name in names}
    return parse_config(arguments(workspace, workspace / "never_made", **names, **paths))


@pytest.mark.parametrize("path", [None, "", "HuggingFaceFW/fineweb-edu"])
def test_a_name_on_the_hub_needs_no_folder(job_config: JobConfig, path: str | None) -> None:
    check_config(job_config)
    assert job_config.documents.held_out_documents == 4833
    on_hub = copy.deepcopy(job_config)
    on_hub.training.dataset_path = on_hub.validation.dataset_path = path
    check_config(on_hub)
    on_hub.training.dataset = on_hub.validation.dataset = "parquet"
    with pytest.raises(ValueError, match="training.dataset_path"):
        check_config(on_hub)


def test_config_refusals(job_config: JobConfig, tmp_path: Path) -> None:
    changed = copy.deepcopy(job_config)
    changed.training.dataset_path = str(tmp_path / "gone")
    with pytest.raises(ValueError, match="there is no file or folder .*gone"):
        check_config(changed)
    changed.training.dataset_path = str(tmp_path)
    with pytest.raises(ValueError, match='training.dataset_path is ".*" and validation.* both sets must come from one'):
        check_config(changed)
    changed.training.dataset_path = job_config.training.dataset_path
    changed.documents.held_out_documents = -1
    with pytest.raises(ValueError, match="documents.held_out_documents is -1; it must be at least 0"):
        check_config(changed)


def test_a_dry_run_needs_no_data(job_config: JobConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dry = copy.deepcopy(job_config)
    dry.comm.mode = "fake_backend"
    dry.training.dataset_path = dry.validation.dataset_path = str(tmp_path / "gone")
    check_config(dry)
    assert [r.getMessage().partition(" = ")[0] for r in caplog.records if "A run would be refused" in r.message] == [
        "training.dataset_path",
        "validation.dataset_path",
    ]
