"""What document i is: kinds of datasets, tokenisation, shards, loader workers; which documents these are."""

import hashlib
import json
import pickle

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.job_config import DataLoader as DataLoaderConfig

from blockgrow_titan.documents.batches import Collator, DocumentDataLoader
from blockgrow_titan.documents.dealing import MicroBatching
from blockgrow_titan.documents.readers import RECORD_READERS, BadDocumentError, RecordReader
from tests.unit_tests.document_kinds import (
    END,
    KINDS,
    TEXTS,
    build,
    fineweb_id,
    in_fork,
    make_tokenizer,
    write_jsonl,
    write_parquet,
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(tokenizer_folder):
    return HuggingFaceTokenizer(tokenizer_folder)


@pytest.fixture
def reference_ids(tokenizer_folder):
    """Token ids of a text by transformers' tokenizer, and the end of the document."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_folder)
    return lambda text: reference(text)["input_ids"] + [reference.convert_tokens_to_ids(END)]


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
    with pytest.raises(ValueError, match=r"documents.shard_documents = 7.* but .* holds 6 documents"):
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
            MicroBatching("count", 1, source.seq_len),
            offset_of_step=lambda step: step - 1,
            last_step=8,
            global_batch_size=3,
            rank=0,
            world_size=1,
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


class CountingReader(RecordReader):
    """Somebody's own kind, with nothing but what it must have."""

    edited = -1

    def __init__(self, config):
        self.length = int(config.path)

    def __len__(self):
        return self.length

    def where(self, i):
        return f"number {i}"

    def ids(self, i, tokenizer):
        if i == 7:
            raise BadDocumentError("number 7: unlucky")
        return list(range(i + (i == self.edited)))


def test_another_kind_is_a_registered_reader(tokenizer, monkeypatch):
    """Ids from anywhere need nothing but a reader."""

    monkeypatch.setitem(RECORD_READERS, "counting", CountingReader)
    source = build("counting", "4", tokenizer, seq_len=3)
    end_id = tokenizer.token_to_id(END)
    assert [*source] == [[end_id], [0, end_id], [0, 1, end_id], [0, 1, 2]]


# Which documents these are


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("count", [1, 4, 6])
def test_identity(kind_and_path, count, tokenizer, reference_ids):
    """Of the bytes of the lines, of the ids if there are any, else of the tokens of the first documents."""
    kind, path = kind_and_path
    source = build(kind, path, tokenizer, shard_documents=count)
    has_ids = kind == "parquet" and path.is_file() or (path / "dataset_info.json").exists()
    if kind == "fineweb_edu":
        expected = "".join(f"{fineweb_id(i)}\n" for i in range(count))
    elif kind == "jsonl":
        files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
        expected = "".join(b"".join(file.read_bytes() for file in files).decode().splitlines(True)[:count])
        assert json.loads(expected.split("\n")[0])["text"] == TEXTS[0]
    elif has_ids:
        expected = "".join(f"{i}\n" for i in range(count))
    elif kind == "datasets":
        expected = "".join(f"{reference_ids(text)[:-1]}\n" for text in TEXTS[:count])
    else:  # two files, each with ids from 0
        expected = "".join(f"{i}\n" for i in [0, 1, 2, 0, 1, 2][:count])
    assert source.identity() == {"documents": count, "digest": sha256(expected)}
    assert build(kind, path, tokenizer).reader.digest(count, tokenizer) == source.identity()["digest"]
    tokenized = source.reader.ids_of(range(count), tokenizer)
    assert tokenized == [reference_ids(text)[:-1] for text in TEXTS[:count]]  # all at once, as one by one
    assert source.read([count - 1, 0]) == [source[count - 1], source[0]]


def test_identity_of_a_dataset_in_another_order(tmp_path, tokenizer):
    import datasets

    order = [5, 0, 3, 1, 4, 2]
    data = datasets.Dataset.from_dict({"text": TEXTS, "id": [f"id {i}" for i in range(6)]})
    data.select(order).save_to_disk(tmp_path / "saved")
    source = build("datasets", tmp_path / "saved", tokenizer, shard_documents=4)
    assert source.identity()["digest"] == sha256("".join(f"id {i}\n" for i in order[:4]))


def test_identity_does_not_depend_on_the_division_into_files(tmp_path, tokenizer):
    whole = build("jsonl", write_jsonl(tmp_path / "whole.jsonl", TEXTS), tokenizer)
    (tmp_path / "parts").mkdir()
    write_jsonl(tmp_path / "parts" / "a.jsonl", TEXTS[:2])
    last = write_jsonl(tmp_path / "parts" / "b.jsonl", TEXTS[2:])
    last.write_text(last.read_text().rstrip("\n"))  # not even on how the last line ends
    assert build("jsonl", tmp_path / "parts", tokenizer).identity() == whole.identity()


def test_identity_of_somebodys_own_kind(tokenizer, monkeypatch):
    """The first 16 documents and every power of two are looked at; a bad one is one of a kind."""
    monkeypatch.setitem(RECORD_READERS, "counting", CountingReader)
    source = build("counting", "40", tokenizer)
    ids = ["bad" if i == 7 else list(range(i)) for i in [*range(16), 16, 32]]
    assert source.identity() == {"documents": 40, "digest": sha256("".join(f"{i}\n" for i in ids))}
    changed = set()
    for edited in range(40):
        monkeypatch.setattr(CountingReader, "edited", edited)
        if source.identity()["digest"] != sha256("".join(f"{i}\n" for i in ids)):
            changed.add(edited)
    assert changed == {*range(16), 16, 32} - {7}


EDITS = {
    "jsonl": lambda path: path.write_text(path.read_text().replace("fortune", "mistake")),
    "parquet": lambda path: write_parquet(path, [*TEXTS[:2], "edited", *TEXTS[3:]], 4, ids=False),
    "parquet with ids": lambda path: write_parquet(path, TEXTS[1:], 4, first_id=1),
    "datasets": lambda path: write_jsonl(path / "train.jsonl", ["edited", *TEXTS[1:]]),
}


@pytest.mark.parametrize("name", EDITS)
def test_changed_documents_have_another_identity(name, tmp_path, tokenizer, monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    if name == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    elif name == "datasets":
        path = write_jsonl(tmp_path / "train.jsonl", TEXTS).parent
    else:
        path = write_parquet(tmp_path / "a.parquet", TEXTS, 4, ids=name == "parquet with ids")
    before = build(name.split()[0], path, tokenizer).identity()
    assert build(name.split()[0], path, tokenizer).identity() == before
    EDITS[name](path)
    after = build(name.split()[0], path, tokenizer).identity()
    assert after["digest"] != before["digest"]
