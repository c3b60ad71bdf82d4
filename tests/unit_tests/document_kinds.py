"""What the tests of documents share: six texts, every kind of dataset that holds them, a tokenizer, FineWeb-Edu's schema."""

import json
import os

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from blockgrow_titan.documents.source import build_source

END = "<|endoftext|>"
TEXTS = [
    "It is a truth universally acknowledged, that a single man",
    "in possession of a good fortune,\nmust be in want of a wife.",
    "",
    "Naïve café: “façade” 😀 \u2028 end",
    "No one who had ever seen Catherine Morland in her infancy would have supposed her born to be an heroine.",
    "Emma",
]


def make_tokenizer(folder):
    """Write a byte-level BPE of a few merges in Hugging Face format; returns the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


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


def write_parquet(path, texts, row_group_size, ids=True, first_id=0):
    columns = {"id": list(range(first_id, first_id + len(texts)))} if ids else {}
    table = pyarrow.table(columns | {"text": texts})
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


FINEWEB_COLUMNS = {
    "text": pyarrow.string(),
    "id": pyarrow.string(),
    "dump": pyarrow.string(),
    "url": pyarrow.string(),
    "file_path": pyarrow.string(),
    "language": pyarrow.string(),
    "language_score": pyarrow.float64(),
    "token_count": pyarrow.int64(),
    "score": pyarrow.float64(),
    "int_score": pyarrow.int64(),
}


def fineweb_id(i):
    return f"<urn:uuid:{i:08x}-0000-4000-8000-000000000000>"


def write_fineweb(folder, texts, ids=None, file_ends=(), row_group_size=2, without=()):
    """Write texts as Parquet files of FineWeb-Edu's schema, the first file up to row ``file_ends[0]`` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = ids or [fineweb_id(i) for i in range(len(texts))]
    for number, (start, end) in enumerate(zip([0, *file_ends], [*file_ends, len(texts)], strict=True)):
        rows = len(texts[start:end])
        columns = {name: pyarrow.nulls(rows, kind) for name, kind in FINEWEB_COLUMNS.items()}
        columns |= {"text": texts[start:end], "id": ids[start:end], "dump": ["CC-MAIN-2024-10"] * rows}
        table = pyarrow.table({name: values for name, values in columns.items() if name not in without})
        pyarrow.parquet.write_table(table, folder / f"{number:03d}_00000.parquet", row_group_size=row_group_size)
    return folder


def fineweb_files(folder):
    return write_fineweb(folder, TEXTS, file_ends=(3,))


def fineweb_repository(folder):
    """As ``hf download`` lays it out, beside other samples."""
    write_fineweb(folder / "sample" / "10BT", TEXTS, file_ends=(1, 5))
    write_fineweb(folder / "sample" / "100BT", ["another sample"])
    return folder


KINDS = [
    ("fineweb_edu", fineweb_files),
    ("fineweb_edu", fineweb_repository),
    ("jsonl", jsonl_file),
    ("jsonl", jsonl_folder),
    ("parquet", parquet_file),
    ("parquet", parquet_folder),
    ("datasets", saved_dataset),
    ("datasets", saved_dataset_dict),
    ("datasets", local_hub_folder),
]
