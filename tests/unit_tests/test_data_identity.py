"""A run whose documents changed does not go on, nor one whose ranks read different ones; every rank says the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from blockgrow_titan.documents.source import DocumentSource
from blockgrow_titan.job_config import ConfigError
from blockgrow_titan.metrics import SUMMARY_FILE
from tests.unit_tests.document_kinds import fineweb_id, write_fineweb, write_parquet
from tests.unit_tests.jobs import arguments, run_job, without_teacher
from tests.unit_tests.models import read_json
from tests.unit_tests.preparing import prepare
from tests.unit_tests.rank_pool import RankPool


def refused(rank: int, world_size: int, store: dist.Store, args: list[str], of_rank_1: list[str], broken: bool) -> str:
    """A pool function: a job that is refused, rank 1 with arguments of its own; the text."""
    identity = DocumentSource.identity

    def unreadable(self: DocumentSource) -> dict[str, Any]:
        raise ValueError("row group 3 cannot be read")

    if broken and rank == 1:
        DocumentSource.identity = unreadable  # type: ignore[method-assign]
    try:
        with pytest.raises(ConfigError) as error:
            run_job(rank, world_size, store, [*args, *(of_rank_1 if rank == 1 else [])])
    finally:
        DocumentSource.identity = identity  # type: ignore[method-assign]
    return str(error.value)


def write_jsonl(folder: Path, texts: list[str], edited: bool) -> dict[str, str]:
    path = folder / "train.jsonl"
    texts = [texts[0].swapcase(), *texts[1:]] if edited else texts  # of the same length
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"training__dataset": "jsonl", "training__dataset_path": str(path)}


def write_parquet_with_ids(folder: Path, texts: list[str], edited: bool) -> dict[str, str]:
    path = write_parquet(folder / "train.parquet", texts, 7, first_id=int(edited))
    return {"training__dataset": "parquet", "training__dataset_path": str(path)}


def write_dataset(folder: Path, texts: list[str], edited: bool) -> dict[str, str]:
    import datasets

    shutil.rmtree(folder / "saved", ignore_errors=True)
    texts = [f"{texts[0]} more", *texts[1:]] if edited else texts
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved")
    return {"training__dataset": "datasets", "training__dataset_path": str(folder / "saved")}


def write_both_sets(folder: Path, texts: list[str], edited: bool) -> dict[str, str]:
    """An edited document of the held-out set only."""
    ids = [fineweb_id(i + 99 * (edited and i == 2)) for i in range(len(texts))]
    path = write_fineweb(folder / "fineweb", texts, ids=ids, file_ends=(20,), row_group_size=5)
    names = {f"{section}__dataset": "fineweb_edu" for section in ("training", "validation")}
    return names | {f"{name}_path": str(path) for name in names} | {"documents__held_out_documents": "4"}


def write_ahead(folder: Path, texts: list[str], edited: bool) -> dict[str, str]:
    """Made again of the edited documents, in the same place: what a digest of a digest is for."""
    shutil.rmtree(folder / "ahead", ignore_errors=True)
    source = write_jsonl(folder, texts, edited)
    prepare(folder.parent / "workspace", folder / "ahead", source)
    return {"training__dataset": "pretokenized", "training__dataset_path": str(folder / "ahead" / "train")}


Write = Callable[[Path, list[str], bool], dict[str, str]]
KINDS: dict[str, tuple[Write, str]] = {
    "jsonl": (write_jsonl, "training: it had 40 documents"),
    "parquet": (write_parquet_with_ids, "training: it had 40 documents"),
    "datasets": (write_dataset, "training: it had 40 documents"),
    "fineweb_edu": (write_both_sets, "validation: it had 4 documents"),
    "pretokenized": (write_ahead, "training: it had 40 documents"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_changed_data_is_refused(workspace: Path, tmp_path: Path, rank_pool: RankPool, kind: str) -> None:
    """One step of two is trained; then a document changes under the same path."""
    (tmp_path / "data").mkdir()
    (tmp_path / "workspace").symlink_to(workspace)
    write, words = KINDS[kind]
    texts = [json.loads(line)["text"] for line in (workspace / "train.jsonl").read_text().splitlines()]
    growth = {"growth__phase_steps": [1, 1], "growth__active_blocks": [1, 1], "training__steps": 2}
    fields = without_teacher() | growth | write(tmp_path / "data", texts, False)
    args = arguments(workspace, tmp_path / "run", **fields)
    rank_pool.run(run_job, 1, args=args)
    data = read_json(tmp_path / "run" / SUMMARY_FILE)["manifest"]["data"]
    assert data.keys() == {"training", "validation"} and len(data["training"]["digest"]) == 64
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-2")
    write(tmp_path / "data", texts, True)
    (text,) = rank_pool.run(refused, 1, args=args, of_rank_1=[], broken=False)
    assert f"{tmp_path / 'run' / 'checkpoint' / 'step-1'} was written by a run on other documents" in text
    assert words in text and "there are now" in text and "--job.dump_folder" in text and "\n" not in text
    write(tmp_path / "data", texts, False)
    rank_pool.run(run_job, 1, args=args)  # the old files are back


def test_ranks_that_disagree(workspace: Path, tmp_path: Path, rank_pool: RankPool) -> None:
    """Another machine with other files under the same path, or with files that cannot be read."""
    lines = (workspace / "train.jsonl").read_text().splitlines(True)
    (tmp_path / "other.jsonl").write_text("".join([*lines[:-1], '{"text": "edited"}\n']))
    args = arguments(workspace, tmp_path / "run", **without_teacher())
    other = ["--training.dataset_path", str(tmp_path / "other.jsonl")]
    answers = rank_pool.run(refused, 2, args=args, of_rank_1=other, broken=False)
    assert answers[0] == answers[1] and "\n" not in answers[0]
    assert answers[0].startswith("student rank 1 on ") and "reads other documents than rank 0 on " in answers[0]
    assert "training: rank 0 has 40 documents (digest " in answers[0] and "rank 1 has 40 documents" in answers[0]
    assert "validation" not in answers[0] and "Give every machine the same files" in answers[0]
    answers = rank_pool.run(refused, 2, args=args, of_rank_1=[], broken=True)
    assert answers[0] == answers[1] and answers[0].endswith(": row group 3 cannot be read")
    assert answers[0].startswith("student rank 1 on ")
