"""What document i is: kinds of datasets, tokenisation, bad records, errors."""

import json
import logging
import os
import pickle

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.job_config import DataLoader as DataLoaderConfig

from blockgrow_titan.documents.batches import Collator, DocumentDataLoader
from blockgrow_titan.documents.readers import RECORD_READERS, RecordReader
from blockgrow_titan.documents.source import PROBED_DOCUMENTS, build_source

END = "<|endoftext|>"
TEXTS = [
    "It is a truth universally acknowledged, that a single man",
    "in possession of a good fortune,\nmust be in want of a wife.",
    "",
    "Naïve café: “façade” 😀 \u2028 end",
    "No one who had ever seen Catherine Morland in her infancy would have supposed her born to be an heroine.",
    "Emma",
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder):
    return HuggingFaceTokenizer(str(tokenizer_folder))


@pytest.fixture
def reference_ids(tokenizer_folder):
    """Token ids of a text by transformers' tokenizer, and the end of the document."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_folder)
    return lambda text: reference(text)["input_ids"] + [reference.convert_tokens_to_ids(END)]


def write_jsonl(path, texts, end="\n"):
    path.write_text("".join(json.dumps({"book": "x", "text": text}) + end for text in texts), encoding="utf-8")
    return path


def build(kind, path, tokenizer, **kwargs):
    kwargs = {"text_column": "text", "end_of_document": END, "seq_len": 512, **kwargs}
    return build_source(kind, str(path), tokenizer, **kwargs)


def in_fork(check):
    """What ``check`` returns in a forked process, as a bool; an exception there is False."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# Kinds: each holds TEXTS, spread over several files or row groups where it has them.


def jsonl_file(folder):
    return write_jsonl(folder / "a.json.lines", TEXTS)


def jsonl_folder(folder):
    write_jsonl(folder / "b.jsonl", TEXTS[4:], end="\r\n")
    write_jsonl(folder / "a.jsonl", TEXTS[:4])
    (folder / "aa.jsonl").write_bytes(b"")
    (folder / "readme.md").write_text("not a dataset")
    return folder


def write_parquet(path, texts, row_group_size):
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def parquet_file(folder):
    return write_parquet(folder / "a.parquet", TEXTS, row_group_size=4)


def parquet_folder(folder):
    write_parquet(folder / "b.parquet", TEXTS[3:], row_group_size=2)
    write_parquet(folder / "a.parquet", TEXTS[:3], row_group_size=2)
    write_parquet(folder / "aa.parquet", pyarrow.array([], pyarrow.string()), row_group_size=2)
    return folder


def saved_dataset(folder):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))}).save_to_disk(folder / "saved")
    return folder / "saved"


def saved_dataset_dict(folder):
    import datasets

    splits = {
        "train": datasets.Dataset.from_dict({"text": TEXTS}),
        "other": datasets.Dataset.from_dict({"text": ["x"]}),
    }
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    return folder / "saved"


def local_hub_folder(folder):
    write_jsonl(folder / "train.jsonl", TEXTS)
    return folder


KINDS = [
    ("jsonl", jsonl_file),
    ("jsonl", jsonl_folder),
    ("parquet", parquet_file),
    ("parquet", parquet_folder),
    ("datasets", saved_dataset),
    ("datasets", saved_dataset_dict),
    ("datasets", local_hub_folder),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind[1].__name__)
def kind_and_path(request, tmp_path, tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    kind, write = request.param
    return kind, write(tmp_path)


def test_documents_equal_transformers_tokenizer(kind_and_path, tokenizer, reference_ids):
    source = build(*kind_and_path, tokenizer)
    assert len(source) == len(TEXTS)
    assert [source[i] for i in range(len(source))] == [reference_ids(text) for text in TEXTS]
    assert source[len(TEXTS) - 1] == source[len(TEXTS) - 1]  # in any order, again and again
    assert source[0] == reference_ids(TEXTS[0])


@pytest.mark.parametrize("shard", range(1, len(TEXTS) + 1))
def test_shard_is_the_first_documents(kind_and_path, shard, tokenizer, reference_ids):
    source = build(*kind_and_path, tokenizer, shard_documents=shard)
    assert len(source) == shard
    assert [*source] == [reference_ids(text) for text in TEXTS[:shard]]


def test_shard_larger_than_the_dataset(kind_and_path, tokenizer):
    with pytest.raises(ValueError, match=r"documents.shard_documents = 7, but .* holds 6 documents"):
        build(*kind_and_path, tokenizer, shard_documents=7)


def test_source_survives_pickling_and_forking(kind_and_path, tokenizer, reference_ids):
    """Forked and spawned loader workers read through their own files."""
    source = build(*kind_and_path, tokenizer)
    source[0]
    copy = pickle.loads(pickle.dumps(source))
    assert [*copy] == [reference_ids(text) for text in TEXTS]
    assert in_fork(lambda: source[4] == copy[4])
    assert source[1] == reference_ids(TEXTS[1])


def test_forked_worker_does_not_move_the_file_of_its_parent(tmp_path, tokenizer, reference_ids):
    """Document 1 begins inside the parent's read buffer and ends behind it; the child reads elsewhere in between."""
    texts = ["short", "long " * 10_000, *["far " * 1_000] * 20]
    source = build("jsonl", write_jsonl(tmp_path / "a.jsonl", texts), tokenizer, seq_len=10**6)
    source[0]
    assert in_fork(lambda: len(source[21]) > 1)
    assert source[1] == reference_ids(texts[1])


def test_loader_workers_read_what_one_process_reads(kind_and_path, tokenizer, reference_ids):
    source = build(*kind_and_path, tokenizer)
    micro_batches = []
    for num_workers in (0, 2):
        loader = DocumentDataLoader(
            source,
            Collator(source.end_of_document_id),
            offset_of_step=lambda step: step - 1,
            last_step=8,
            global_batch_size=3,
            rank=0,
            world_size=1,
            local_batch_size=1,
            config=DataLoaderConfig(num_workers=num_workers),
        )
        micro_batches.append([(inputs["input"].tolist(), labels.tolist()) for inputs, labels in loader])
    ids = [reference_ids(text) for text in TEXTS]
    ids[TEXTS.index("")] = [ids[0][-1], -100]  # no predictions: one row of padding, its label ignored
    assert micro_batches[0] == micro_batches[1] == [([row[:-1]], [row[1:]]) for row in ids] * 4


def test_truncation(tmp_path, tokenizer, reference_ids):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for seq_len in (2, 5, 11, 12, 13, 1000):
        source = build("jsonl", path, tokenizer, seq_len=seq_len)
        assert [*source] == [reference_ids(text)[:seq_len] for text in TEXTS]


def test_end_of_document_is_kept_exactly_when_it_fits(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:1])
    length = len(build("jsonl", path, tokenizer)[0])
    end_id = tokenizer.token_to_id(END)
    assert build("jsonl", path, tokenizer, seq_len=length)[0][-1] == end_id
    cut = build("jsonl", path, tokenizer, seq_len=length - 1)[0]
    assert len(cut) == length - 1 and end_id not in cut


def test_truncation_and_padding_of_the_tokenizer_file_are_switched_off(tmp_path, tokenizer, reference_ids):
    tokenizer.tokenizer.enable_truncation(max_length=3)
    tokenizer.tokenizer.enable_padding(length=200, pad_id=7)
    source = build("jsonl", write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer)
    assert [*source] == [reference_ids(text) for text in TEXTS]


def test_index_out_of_range(tmp_path, tokenizer):
    source = build("jsonl", write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer, shard_documents=2)
    for i in (2, -1):
        with pytest.raises(IndexError):
            source[i]


@pytest.mark.parametrize("ending", ["", "\n", "\n\n", "\r\n \n\t\n"])
def test_blank_lines_at_the_end_are_no_documents(ending, tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}' + ending)
    source = build("jsonl", path, tokenizer)
    assert len([*source]) == 2
    assert len(build("jsonl", path, tokenizer, shard_documents=2)) == 2


def test_package_path(tokenizer):
    source = build("jsonl", "package:blockgrow_titan/assets/corpus/austen_validation.jsonl", tokenizer)
    assert len(source) == 285


def test_another_kind_is_a_registered_reader(tokenizer, monkeypatch):
    """Pre-tokenised shards need nothing but a reader of ids."""

    class CountingReader(RecordReader):
        def __init__(self, config):
            self.length = int(config.path)

        def __len__(self):
            return self.length

        def where(self, i):
            return f"number {i}"

        def ids(self, i, tokenizer):
            return list(range(i))

    monkeypatch.setitem(RECORD_READERS, "counting", CountingReader)
    source = build("counting", "4", tokenizer, seq_len=3)
    end_id = tokenizer.token_to_id(END)
    assert [*source] == [[end_id], [0, end_id], [0, 1, end_id], [0, 1, 2]]


# Bad documents


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


# Errors at the start


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
