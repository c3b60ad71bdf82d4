"""A run on documents tokenised ahead of time is the run on the fly; folders and configs that do not fit are refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.job_config import DataLoader as DataLoaderConfig

from blockgrow_titan.checks import check_config
from blockgrow_titan.documents.batches import Collator, DocumentDataLoader
from blockgrow_titan.documents.dealing import MicroBatching
from blockgrow_titan.documents.pretokenized import read_index, tokenizer_fingerprint
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments, losses, validations
from tests.unit_tests.models import read_json
from tests.unit_tests.preparing import (
    ahead,
    on_the_fly,
    prepare,
    refusal,
    sources,
    write_documents,
)
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.resuming import TIMEOUT, completed, contents, interrupted, resumptions, undated


@pytest.fixture(scope="module")
def fineweb(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(workspace, tmp_path_factory.mktemp("fineweb"))


@pytest.fixture(scope="module")
def prepared(workspace: Path, fineweb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(workspace, tmp_path_factory.mktemp("prepared") / "out", on_the_fly(fineweb))


@pytest.mark.parametrize(("num_workers", "kind"), [(0, "count"), (0, "balanced"), (2, "packed")])
def test_the_same_batches(workspace: Path, fineweb: Path, prepared: Path, num_workers: int, kind: str) -> None:
    batches = []
    for overrides in (on_the_fly(fineweb), ahead(prepared)):
        source = sources(workspace, overrides)["train"]
        for rank in (0, 1):
            loader = DocumentDataLoader(
                source,
                Collator(source.end_of_document_id),
                MicroBatching(kind, 2, 2 * source.seq_len),
                offset_of_step=lambda step: step - 1,
                last_step=5,
                global_batch_size=9,
                rank=rank,
                world_size=2,
                config=DataLoaderConfig(num_workers=num_workers),
            )
            batches.append([(inputs["input"].tolist(), labels.tolist()) for inputs, labels in loader.iterate_from(2)])
    assert batches[:2] == batches[2:] and len(batches[0]) >= 4


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 1)])
def test_jobs_have_the_same_losses(
    workspace: Path,
    fineweb: Path,
    prepared: Path,
    tmp_path: Path,
    rank_pool: RankPool,
    world_size: int,
    num_workers: int,
) -> None:
    """Bit for bit, also if the run on prepared data is interrupted and resumed from a checkpoint in its middle."""
    common = {"training__local_batch_size": 3, "validation__freq": 2}
    args = arguments(workspace, tmp_path / "fly", **on_the_fly(fineweb, **common))
    fly = rank_pool.run(completed, world_size, timeout=TIMEOUT, args=args)[0]
    workers = {"training__dataloader__num_workers": num_workers}
    args = arguments(workspace, tmp_path / "made", **ahead(prepared, **common, **workers))
    causes = rank_pool.run(interrupted, world_size, timeout=TIMEOUT, args=args, step=5, after=False)
    assert all("pulled the plug at step 5" in cause for cause in causes), causes
    made = rank_pool.run(completed, world_size, timeout=TIMEOUT, args=args)[0]
    assert resumptions(tmp_path / "made") == [4]
    assert losses(made) == losses(fly) and len(losses(fly)) == 6
    assert validations(made) == validations(fly) and len(validations(fly)) == 6
    assert undated(made) == undated(fly)
    manifests = [read_json(tmp_path / run / "checkpoint" / "step-6" / "manifest.json") for run in ("fly", "made")]
    assert manifests[0]["data"] == manifests[1]["data"]
    assert {name: data["documents"] for name, data in manifests[0]["data"].items()} == {"training": 21, "validation": 5}
    states = [contents(tmp_path / run / "checkpoint" / "step-6") for run in ("fly", "made")]
    assert all(np.array_equal(value, states[1][key]) for key, value in states[0].items() if hasattr(value, "shape"))


# Refusals


@pytest.fixture
def copied(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copied"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training__seq_len": 25}, "training.seq_len = 25, but .* of 24 tokens at most: lower training.seq_len"),
        ({"validation__seq_len": 25, "training__seq_len": 24}, "validation.seq_len = 25, but validation.dataset_path"),
        ({"documents__shard_documents": 22}, "documents.shard_documents = 22, but .* holds 21 documents"),
        ({"documents__held_out_documents": 4}, "documents.held_out_documents = 4, but .* with 5: .* could overlap"),
    ],
)
def test_configs_that_do_not_fit(workspace: Path, prepared: Path, changes: dict[str, Any], words: str) -> None:
    assert re.search(words, refusal(workspace, ahead(prepared, **changes)))


def test_the_sets_may_not_be_confused(workspace: Path, prepared: Path) -> None:
    swapped = {"training__dataset_path": str(prepared / "validation"), "documents__shard_documents": -1}
    text = refusal(workspace, ahead(prepared, **swapped))
    assert "was prepared as the validation set of fineweb_edu: the training section needs the other one" in text


def test_another_tokenizer_of_the_same_size(workspace: Path, prepared: Path, tmp_path: Path) -> None:
    """Two ids change places: the ids of a text do too."""
    folder = Path(shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer"))
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    text = refusal(workspace, ahead(prepared, model__hf_assets_path=str(folder)))
    assert "was prepared with another tokenizer" in text and str(folder) in text and "model.hf_assets_path" in text


def test_what_leaves_a_fingerprint(workspace: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(workspace / "tokenizer"))
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.tokenizer.enable_truncation(max_length=3)
    tokenizer.tokenizer.enable_padding(length=200)
    assert tokenizer_fingerprint(tokenizer) == before  # neither counts for documents
    tokenizer.tokenizer.add_tokens(["zebra"])
    assert tokenizer_fingerprint(tokenizer) != before


@pytest.mark.parametrize("what", ["ids", "offsets", "digests"])
@pytest.mark.parametrize("damage", ["shorter", "longer", "missing"])
def test_damaged_shards(workspace: Path, copied: Path, what: str, damage: str) -> None:
    path = copied / "train" / f"00001.{what}"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "shorter" else path.read_bytes() + b"\0")
    text = refusal(workspace, ahead(copied))
    assert f"{path} {'is missing' if damage == 'missing' else 'has'}" in text and "prepare the data again" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            None,
            "dataset.json cannot be read (No such file or directory): prepare the data again (tools/prepare_data.py",
        ),
        ("{", "dataset.json is not JSON"),
        ("\xff", "dataset.json is not JSON"),
        ("[" * 100_000, "dataset.json is not JSON"),
        ('{"format": 2}', "dataset.json is not of format 1: prepare the data again with this version"),
        ("[]", "dataset.json holds no JSON object"),
        ({"tokenizer": 3}, "dataset.json has a wrong tokenizer"),
        ({"id_type": "float64"}, "dataset.json has a wrong id_type"),
        ({"max_length": "24"}, "dataset.json has a wrong max_length"),
        ({"shards": [[8, 100], [8]]}, "dataset.json has a wrong shards"),
        ({"shards": [[8, -100]]}, "dataset.json has a wrong shards"),
        ({"bad_documents": {"x": "y"}}, "dataset.json has a wrong bad_documents"),
        ({"source": {}}, "dataset.json has a wrong source"),
        ({"source": None}, "dataset.json has a wrong source"),
    ],
)
def test_index_files(copied: Path, content: str | dict[str, Any] | None, words: str) -> None:
    path = copied / "train" / "dataset.json"
    whole = read_json(path)
    path.unlink()
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(whole | content)
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError) as error:
        read_index(str(path.parent))
    assert words in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("what", "place", "value", "words"),
    [
        ("ids", 0, 0xFFFF, "00000.ids is damaged: document 0 has the id 65535, the tokenizer's end at"),
        ("offsets", 1, -1, "00000.offsets is damaged: document 0 would be ids 0 to -1 of"),
        ("offsets", 1, 1 << 40, "00000.offsets is damaged: document 0 would be ids 0 to 1099511627776 of"),
        ("offsets", 0, 1 << 20, "00000.offsets is damaged: document 0 would be ids 1048576 to"),
    ],
)
def test_edited_shards(workspace: Path, copied: Path, what: str, place: int, value: int, words: str) -> None:
    """Files of the right size with other content: damage of many documents, so it is never skipped."""
    path = copied / "train" / f"00000.{what}"
    content = np.fromfile(path, dtype=np.uint16 if what == "ids" else np.int64)
    content[place] = value
    content.tofile(path)
    assert words in refusal(workspace, ahead(copied, documents__on_bad_document="skip"))


def test_missing_folder(workspace: Path, tmp_path: Path) -> None:
    text = refusal(workspace, ahead(tmp_path / "gone"))
    assert "training.dataset_path" in text and "there is no file or folder" in text


def test_sets_divided_from_different_paths(workspace: Path, prepared: Path, tmp_path: Path) -> None:
    """Prepared training documents and held-out ones of other files could overlap; of the same files they cannot."""
    read = read_index(str(prepared / "train"))["source"]["path"]
    for path, words in ((read, ""), (str(tmp_path), f"divided from {read} and {tmp_path}")):
        overrides = ahead(prepared, validation__dataset="fineweb_edu", validation__dataset_path=path)
        job_config = parse_config(arguments(workspace, tmp_path / "never_made", **overrides))
        if words:
            with pytest.raises(ValueError, match=words):
                check_config(job_config)
        else:
            check_config(job_config)
