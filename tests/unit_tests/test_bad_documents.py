"""Records that cannot be read, datasets and settings that cannot be used: what the errors say, what is skipped."""

import gzip
import logging
import os

import pyarrow
import pyarrow.parquet
import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents.source import PROBED_DOCUMENTS
from tests.unit_tests.document_kinds import (
    END,
    TEXTS,
    build,
    in_fork,
    make_tokenizer,
    saved_dataset,
    saved_dataset_dict,
    write_jsonl,
    write_parquet,
)
from tests.unit_tests.jobs import arguments, run_job


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


BAD_LINES = {
    "syntax": (b'{"text": "b"', "not JSON (Expecting ',' delimiter: column 13)"),
    "blank line": (b"", "not JSON (Expecting value: column 1)"),
    "not an object": (b'["text"]', "a JSON list, not an object"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8 (invalid start byte at byte 10)"),
    "no column": (
        b'{"title": "b", "url": "c"}',
        'there is no "text", which documents.text_column names; there are: title',
    ),
    "null": (b'{"text": null}', "the text is of type NoneType, not a string"),
    "list": (b'{"text": [1, 2]}', "the text is of type list, not a string"),
    "half a surrogate pair": (b'{"text": "a\\ud83d"}', "the text is not valid Unicode (surrogates not allowed)"),
    "too deep": (b"[" * 100_000, "JSON that cannot be read"),
}


def write_bad_line(folder, line):
    """Two files; line 2 of the second, document 4 of 6, is bad."""
    write_jsonl(folder / "a.jsonl", TEXTS[:3])
    (folder / "b.jsonl").write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')
    return folder


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_stops_with_file_and_line(name, tmp_path, tokenizer):
    line, reason = BAD_LINES[name]
    source = build("jsonl", write_bad_line(tmp_path, line), tokenizer)
    assert len(source) == 6
    with pytest.raises(ValueError) as error:
        source[4]
    assert str(error.value).startswith(f"{tmp_path / 'b.jsonl'}:2: {reason}")
    assert "documents.on_bad_document" in str(error.value)
    assert source[5][:-1] == tokenizer.encode("last", add_bos=False, add_eos=False)


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_is_skipped_logged_once_and_counted(name, tmp_path, tokenizer, caplog):
    line, reason = BAD_LINES[name]
    source = build("jsonl", write_bad_line(tmp_path, line), tokenizer, on_bad_document="skip")
    assert source.bad_documents == 0
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert source[4] == [tokenizer.token_to_id(END)]
    assert source.bad_documents == 1
    warnings = [
        record.getMessage() for record in caplog.records if "Counted as an empty document" in record.getMessage()
    ]
    assert len(warnings) == 1 and f"{tmp_path / 'b.jsonl'}:2: {reason}" in warnings[0]
    assert len(source[3]) > 1 and len(source[5]) > 1


def test_bad_document_in_a_forked_process_is_counted_here(tmp_path, tokenizer):
    source = build("jsonl", write_bad_line(tmp_path, b"{"), tokenizer, on_bad_document="skip")
    assert in_fork(lambda: len(source[4]) == 1)
    assert source.bad_documents == 1


def test_bad_first_document_stops_at_the_start(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [None, "fine"])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the text is of type NoneType"):
        build("jsonl", path, tokenizer)
    assert len(build("jsonl", path, tokenizer, on_bad_document="skip")[1]) > 1


@pytest.mark.parametrize("count", [1, PROBED_DOCUMENTS + 5])
def test_wrong_column_stops_even_where_bad_documents_are_skipped(count, tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"] * count)
    with pytest.raises(ValueError) as error:
        build("jsonl", path, tokenizer, text_column="body", on_bad_document="skip")
    assert f"all of the first {min(count, PROBED_DOCUMENTS)} documents are bad" in str(error.value)
    assert f'{path}:1: there is no "body", which documents.text_column names; there are: book, text' in str(error.value)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_bad_row(kind, tmp_path, tokenizer):
    import datasets

    texts = ["a", "b", "c", None, "e"]
    if kind == "parquet":
        path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=2)
        where = f"{path}, row 3"
    else:
        path = tmp_path / "saved"
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)
        where = f"{path}, split train, row 3"
    with pytest.raises(ValueError) as error:
        build(kind, path, tokenizer)[3]
    assert str(error.value).startswith(f"{where}: the text is of type NoneType, not a string")
    source = build(kind, path, tokenizer, on_bad_document="skip")
    assert [len(ids) for ids in source] == [2, 2, 2, 1, 2] and source.bad_documents == 1


def test_parquet_row_counts_from_its_own_file_and_needs_utf8(tmp_path, tokenizer):
    write_parquet(tmp_path / "a.parquet", TEXTS[:3], row_group_size=2)
    raw = pyarrow.array([b"a", b"b", b"c\xff"], pyarrow.binary()).view(pyarrow.string())
    write_parquet(tmp_path / "b.parquet", raw, row_group_size=2)
    source = build("parquet", tmp_path, tokenizer)
    with pytest.raises(ValueError) as error:
        source[5]
    assert str(error.value).startswith(f"{tmp_path / 'b.parquet'}, row 2: not UTF-8 (invalid start byte at byte 1)")


def test_parquet_row_group_that_cannot_be_decoded_is_never_skipped(tmp_path, tokenizer):
    path = write_parquet(
        tmp_path / "a.parquet", ["first"] * 3 + [f"text {i} " * 50 for i in range(50)], row_group_size=3
    )
    content = bytearray(path.read_bytes())
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(5).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    source = build("parquet", path, tokenizer, on_bad_document="skip")
    with pytest.raises(ValueError, match=r"a\.parquet: row group 5 cannot be read"):
        source[16]
    assert source.bad_documents == 0 and len(source[18]) > 1


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path, tokenizer):
    whole = write_jsonl(tmp_path / "whole.jsonl", TEXTS)
    marked = tmp_path / "folder"
    marked.mkdir()
    for number, lines in enumerate((whole.read_bytes().splitlines(True)[:3], whole.read_bytes().splitlines(True)[3:])):
        (marked / f"{number}.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    assert [*build("jsonl", marked, tokenizer)] == [*build("jsonl", whole, tokenizer)]
    (tmp_path / "middle.jsonl").write_bytes(b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n')  # two files put together
    with pytest.raises(ValueError, match=r"middle\.jsonl:2: not JSON .Unexpected UTF-8 BOM"):
        build("jsonl", tmp_path / "middle.jsonl", tokenizer)[1]


def counted(rank, world_size, store, args):
    """What rank 0 says of skipped documents in a whole job."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger()
    logger.addHandler(handler)
    try:
        run_job(rank, world_size, store, args)
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "counted as empty" in line]


def test_skipped_documents_are_counted_at_the_end(rank_pool, workspace, tmp_path):
    """Each rank meets its own, some again in a second epoch; every one counts once."""
    lines = (workspace / "train.jsonl").read_bytes().splitlines(True)
    for place in (3, 10, 17, 30):
        lines[place] = b"no JSON\n"
    (tmp_path / "train.jsonl").write_bytes(b"".join(lines))
    args = arguments(
        workspace,
        tmp_path / "out",
        training__dataset_path=tmp_path / "train.jsonl",
        training__local_batch_size=2,
        documents__on_bad_document="skip",
        documents__micro_batching="count",
        validation__enable=False,
        checkpoint__enable=False,
    )
    for said in rank_pool.run(counted, 2, args=args):
        assert said == [
            'training: 4 documents of 40 could not be read and counted as empty (documents.on_bad_document = "skip")'
        ]


# Errors at the start


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl"])
def test_compressed_files(name, tmp_path, tokenizer):
    content = gzip.compress(b'{"text": "a"}\n') if "zst" not in name else b"\x28\xb5\x2f\xfd\x04\x00"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is compressed: decompress it first, with gunzip or unzstd"):
        build("jsonl", tmp_path / name, tokenizer)


def test_what_is_no_file(tmp_path, tokenizer, monkeypatch):
    """A folder that has a dataset's name inside a folder, and what the system refuses to open."""
    (tmp_path / "folder" / "a.jsonl").mkdir(parents=True)
    (tmp_path / "folder" / "a.parquet").mkdir(parents=True)
    with pytest.raises(ValueError, match=r'training.dataset_path = ".*a\.jsonl cannot be read .Is a directory'):
        build("jsonl", tmp_path / "folder", tokenizer)
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        build("parquet", tmp_path / "folder", tokenizer)
    for kind in ("jsonl", "parquet"):
        monkeypatch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(ValueError, match=r"training.dataset_path = .*folder cannot be read .Permission denied"):
            build(kind, tmp_path / "folder", tokenizer)


@pytest.mark.parametrize("name", ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("damage", ["missing", "half"])
def test_incomplete_saved_datasets(name, damage, tmp_path, tokenizer, monkeypatch):
    """Without ``state.json`` it is a folder of data files, whose rows are the same."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = saved_dataset(tmp_path) / name
    whole, content = [*build("datasets", file.parent, tokenizer)], file.read_bytes()
    file.unlink()
    if damage == "half":
        file.write_bytes(content[: len(content) // 2])
    if (name, damage) == ("state.json", "missing"):
        assert [*build("datasets", file.parent, tokenizer)] == whole
        return
    with pytest.raises(ValueError, match=f'training.dataset_path = "{file.parent}" cannot be loaded'):
        build("datasets", file.parent, tokenizer)


def test_missing_path_names_the_field_and_the_resolved_path(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("jsonl", "parquet"):
        with pytest.raises(ValueError) as error:
            build(kind, "data/a", tokenizer, field="validation.dataset_path")
        assert 'validation.dataset_path = "data/a"' in str(error.value)
        assert str(tmp_path / "data" / "a") in str(error.value)


def test_missing_dataset_and_missing_split(tmp_path, tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match='training.dataset_path = "./no/such/folder" cannot be loaded'):
        build("datasets", "./no/such/folder", tokenizer)
    path = saved_dataset_dict(tmp_path)
    with pytest.raises(ValueError, match='there is no split "validation"; there are: train, other'):
        build("datasets", path, tokenizer, split="validation")


def test_empty_datasets(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("\n\n")
    (tmp_path / "folder").mkdir()
    write_parquet(tmp_path / "a.parquet", pyarrow.array([], pyarrow.string()), row_group_size=1)
    for kind, name in (("jsonl", "a.jsonl"), ("parquet", "a.parquet")):
        with pytest.raises(ValueError, match=f'training.dataset_path = ".*{name}" holds no documents'):
            build(kind, tmp_path / name, tokenizer)
        with pytest.raises(ValueError, match=rf"the folder .*folder has no \*\.{kind} file"):
            build(kind, tmp_path / "folder", tokenizer)


def test_not_parquet(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        build("parquet", path, tokenizer)


def test_missing_column_names_the_columns_there_are(tmp_path, tokenizer):
    write_parquet(tmp_path / "a.parquet", TEXTS, row_group_size=4)
    for kind, path in (("parquet", tmp_path / "a.parquet"), ("datasets", saved_dataset(tmp_path))):
        with pytest.raises(
            ValueError, match='there is no "body", which documents.text_column names; there are: (id|text),'
        ):
            build(kind, path, tokenizer, text_column="body", on_bad_document="skip")


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"kind": "c4"}, 'training.dataset = "c4" must be one of: jsonl, parquet, datasets'),
        ({"kind": "c4", "field": "validation.dataset_path"}, 'validation.dataset = "c4" must be one of'),
        ({"path": ""}, "training.dataset_path is empty"),
        ({"end_of_document": "<eod>"}, 'documents.end_of_document = "<eod>" must be a token of the tokenizer in /.*'),
        ({"on_bad_document": "ignore"}, 'documents.on_bad_document = "ignore" must be one of: stop, skip'),
        ({"shard_documents": 0}, "documents.shard_documents = 0 must be at least 1, or -1"),
        ({"shard_documents": -2}, "documents.shard_documents = -2 must be at least 1, or -1"),
        ({"seq_len": 1}, "training.seq_len = 1 must be at least 2"),
    ],
)
def test_wrong_settings(kwargs, message, tmp_path, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    kwargs = {"kind": "jsonl", "path": tmp_path / "a.jsonl", **kwargs}
    with pytest.raises(ValueError, match=message):
        build(kwargs.pop("kind"), kwargs.pop("path"), tokenizer, **kwargs)
