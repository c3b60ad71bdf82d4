"""The data benchmark: what it counts, the documents that it makes, and that a late start reads what an early one does."""

import json
from pathlib import Path

import pytest

from blockgrow_titan.documents.batches import DocumentDataLoader
from tools.benchmarks import data


@pytest.fixture(scope="module")
def loader() -> DocumentDataLoader:
    return data.loader_of(data.tiny_config())


def test_it_counts_every_token_with_a_prediction(loader: DocumentDataLoader) -> None:
    source, steps = loader.source, 2
    tokens = 0
    for i in range(steps * loader.global_batch_size):
        ids = source.tokenizer.encode(source.reader.text(i), add_bos=False, add_eos=False)
        tokens += min(len(ids) + 1, source.seq_len) - 1
    assert data.read_steps(loader, steps) == tokens
    by_rank = [data.loader_of(data.tiny_config(), world_size=2) for _ in range(2)]
    by_rank[1].rank = 1
    assert sum(data.read_steps(each, steps) for each in by_rank) == tokens


def test_a_late_start_reads_the_same_documents(loader: DocumentDataLoader) -> None:
    late = data.late_step(loader)
    assert 0.9 * data.LATE < late < 1.1 * data.LATE
    assert data.read_steps(loader, 1, late) == data.read_steps(loader, 1)
    assert data.read_steps(loader, 1, late + 1) == data.read_steps(loader, 1, 2) != data.read_steps(loader, 1)


def test_ahead_of_time_gives_the_same_steps(tmp_path: Path) -> None:
    data.write_documents(tmp_path / "documents.jsonl", seq_len=512, count=24)
    text = data.tiny_config(dataset_path=str(tmp_path / "documents.jsonl"), seq_len=512)
    ahead_of_time = data.tiny_config(dataset_path=text.training.dataset_path, seq_len=512)
    data.pretokenize(ahead_of_time, data.BASE_CONFIG, tmp_path / "tokens")
    assert ahead_of_time.training.dataset == "pretokenized"
    assert data.read_steps(data.loader_of(ahead_of_time), 3) == data.read_steps(data.loader_of(text), 3)


def test_documents_like_the_papers(tmp_path: Path) -> None:
    data.write_documents(tmp_path / "documents.jsonl", seq_len=8192, count=200)
    texts = [json.loads(line)["text"] for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    tokenizer = data.build_tokenizer(data.tiny_config())
    lengths = [len(tokenizer.encode(text, add_bos=False, add_eos=False)) for text in texts]
    assert len(texts) == 200
    assert sum(lengths) / 200 == pytest.approx(data.PAPER_TOKENS, rel=0.2)
    assert max(lengths) > 3 * data.PAPER_TOKENS
