"""Invariant 8: validation is total loss over total tokens, whatever the ranks and the batch size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.jobs import arguments, open_trainer
from tests.unit_tests.rank_pool import RankPool


def validate_twice(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[dict[str, Any]]:
    trainer = open_trainer(rank, world_size, store, args)
    if trainer is None:  # a teacher's rank
        return []
    trainer.metrics_processor.start(trainer.schedule, trainer.phase, 0)
    results = [trainer.validator.validate(trainer.model_parts, 0) for _ in range(2)]
    trainer.teacher.close()
    trainer.close()
    return results


def reference(workspace: Path, documents: Path, placement: str) -> dict[str, float]:
    """Means over all tokens, float64, one document at a time on unsharded models: transformers' for the teacher."""
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    from tests.unit_tests.models import small_model

    teacher = Qwen3ForCausalLM.from_pretrained(workspace / "teacher", dtype=torch.float32).eval()
    student = small_model(placement, 1, vocab_size=teacher.config.vocab_size, seed=7)
    with torch.no_grad():
        student.tok_embeddings.weight.copy_(teacher.model.embed_tokens.weight)
        student.output.weight.copy_(teacher.lm_head.weight)
        student.norm.weight.copy_(teacher.model.norm.weight)
    tokenizer = Tokenizer.from_file(str(workspace / "tokenizer" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    ce = kl = kd = 0.0
    tokens = 0
    for line in documents.read_text().splitlines():
        ids = (tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids + [end])[:24]
        if len(ids) < 2:
            continue
        inputs = torch.tensor([ids[:-1]])
        with torch.no_grad():
            p = student(inputs)[0].double().log_softmax(-1)
            q = teacher(inputs).logits[0].double().log_softmax(-1)
        ce += sum(-p[i, label].item() for i, label in enumerate(ids[1:]))
        kd += -(q.exp() * p).sum().item()
        kl += (q.exp() * (q - p)).sum().item()
        tokens += len(ids) - 1
    return {"ce": ce / tokens, "kl": kl / tokens, "kd": kd / tokens, "valid_tokens": tokens}


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(
    ("world_size", "teacher_ranks", "batch"), [(1, 0, 7), (1, 0, 1), (2, 0, 2), (2, 1, 3), (3, 0, 4), (3, 1, 2)]
)
def test_equals_a_plain_loop_and_repeats_bit_for_bit(
    rank_pool: RankPool,
    workspace: Path,
    tmp_path: Path,
    placement: str,
    world_size: int,
    teacher_ranks: int,
    batch: int,
) -> None:
    args = arguments(
        workspace, tmp_path, block_stack__placement=placement, teacher__ranks=teacher_ranks,
        validation__local_batch_size=batch,
    )  # fmt: skip
    students = world_size - teacher_ranks
    ranks = rank_pool.run(validate_twice, world_size, args=args)[:students]
    expected = reference(workspace, workspace / "validation.jsonl", placement)
    for first, second in ranks:
        assert first == second == ranks[0][0]
        for name, value in expected.items():
            # kl is a small difference of fp32 sums as large as kd
            tolerance = {"abs": 1e-6 * expected["kd"]} if name == "kl" else {"rel": 1e-6}
            assert first[name] == pytest.approx(value, **tolerance), name
        assert first["loss"] == pytest.approx(0.7 * first["kl"] + 0.3 * first["ce"], rel=1e-9)
        assert first["documents"] == 7


@pytest.mark.parametrize("documents", [1, 3])
def test_fewer_documents_than_ranks_need_finish(
    rank_pool: RankPool, workspace: Path, tmp_path: Path, documents: int
) -> None:
    """3 documents on 2 ranks, and 1 document: a rank without any runs empty micro-batches."""
    subset = tmp_path / "subset.jsonl"
    lines = (workspace / "validation.jsonl").read_text().splitlines(keepends=True)
    subset.write_text("".join(lines[:documents]))
    args = arguments(workspace, tmp_path / "out", validation__dataset_path=subset, validation__local_batch_size=1)
    results = rank_pool.run(validate_twice, 2, args=args)
    expected = reference(workspace, subset, "post")
    assert results[0] == results[1]
    assert results[0][0]["ce"] == pytest.approx(expected["ce"], rel=1e-6)


def test_a_set_without_predictions_is_not_a_division_by_zero(
    rank_pool: RankPool, workspace: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    args = arguments(workspace, tmp_path / "out", validation__dataset_path=empty)
    (result, _), *_ = rank_pool.run(validate_twice, 1, args=args)
    assert result["valid_tokens"] == 0 and result["ce"] == 0.0
