"""A placement that a user adds is exported as it was trained, or refused because its class is not all there is."""

from pathlib import Path

import pytest
import torch

from blockgrow_titan.hf.to_hf import to_hf
from blockgrow_titan.model.placement import PLACEMENTS, DecoderLayer
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.students import (  # noqa: F401  (fixtures)
    IDS,
    USER,
    assert_whole,
    files_in,
    load,
    logits,
    made,
    own_module_cache,
    trained,
    training_model,
    user_placement,
)


@pytest.mark.usefixtures("user_placement")
@pytest.mark.parametrize("name", ["sandwich", "scaled_post", "doubled_pre"])
def test_a_users_placement(workspace: Path, tmp_path: Path, name: str) -> None:
    checkpoint = made(workspace, tmp_path, name, experimental__custom_import=USER)
    to_hf(checkpoint, tmp_path / "out")
    model, reference = load(tmp_path / "out"), training_model(checkpoint, name)
    assert (logits(model, IDS) - logits(reference, IDS)).abs().max() < 1e-5
    assert torch.equal(model.generate(IDS, max_new_tokens=3), model.generate(IDS, max_new_tokens=3, use_cache=False))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), IDS), logits(model, IDS))
    names = assert_whole(tmp_path / "out")
    if name == "sandwich":
        assert {"model.layers.1.ffn_out_norm.weight", "model.layers.0.attention_out_norm.weight"} <= names.keys()
    if name == "scaled_post":
        assert "model.layers.1.post_attention_layernorm.bias" in names


@pytest.mark.usefixtures("user_placement")
def test_a_trained_users_placement(workspace: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    """The whole way: the job imports the module, the manifest names it, the export finds it there."""
    folder = trained(workspace, rank_pool, "sandwich", "teacher", experimental__custom_import=USER)
    checkpoint = folder / "checkpoint" / "step-4"
    to_hf(checkpoint, tmp_path / "out")
    difference = logits(load(tmp_path / "out"), IDS) - logits(training_model(checkpoint, "sandwich"), IDS)
    assert difference.abs().max() < 1e-5


class Enclosing:
    class PostNorm(DecoderLayer):
        """Shares its name with none of the file's classes, and its qualified name has a dot."""

        def place(self, h, attend):
            return h + attend(self.attention_norm(h)) + self.feed_forward(self.ffn_norm(h))


def test_a_class_inside_a_class(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACEMENTS, "parallel", Enclosing.PostNorm)
    checkpoint = made(workspace, tmp_path, "parallel")
    to_hf(checkpoint, tmp_path / "out")
    difference = logits(load(tmp_path / "out"), IDS) - logits(training_model(checkpoint, "parallel"), IDS)
    assert difference.abs().max() < 1e-5


@pytest.mark.usefixtures("user_placement")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("helped", "HelpedNorm uses _helper, which is defined outside the class"),
        ("buffered", "gain is a tensor that files do not hold"),
        ("weighted", "code fails in the exported file .AttributeError"),
        ("importing", "ImportingNorm imports blockgrow_titan.model.init; whoever loads the file has torch and"),
        ("shifted", "its logits with the KV cache differ from those without"),
        ("sourceless", "the source of Sourceless is not available .*define it in a file"),
        ("taken", "two classes of the exported file would be called BlockStackModel"),
    ],
)
def test_code_that_is_not_self_contained(workspace: Path, tmp_path: Path, name: str, reason: str) -> None:
    checkpoint = made(workspace, tmp_path / "run", name, experimental__custom_import=USER)
    with pytest.raises(ValueError, match=f'placement "{name}" cannot be exported: .*{reason}'):
        to_hf(checkpoint, tmp_path / "out")
    assert files_in(tmp_path) == ["run"]
