"""Checkpoints of toy students for tests of export and verification: trained by whole jobs, or made without training."""

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from blockgrow_titan.checkpoint_io import ChecksumWriter
from blockgrow_titan.growth.manifest import DataIdentity, build_manifest, write_manifest
from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.model.args import FLAVORS, BlockStackArgs
from blockgrow_titan.model.model import BlockStackModel
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments, run_job
from tests.unit_tests.models import randomize_norms, read_json
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.resuming import contents

PHASES = {"growth__phase_steps": [1, 2, 1], "growth__active_blocks": [1, 2, 3], "training__steps": 4}
DEPTHS = {1: 1, 2: 2, 3: 2, 4: 3}  # step -> blocks: after phase 0, inside phase 1, after it, at the end
SEQ_LEN = 24
IDS = torch.randint(3, 300, (3, 17), generator=torch.Generator().manual_seed(0))
USER = "tests.unit_tests.user_placements"


def trained(
    workspace: Path, rank_pool: RankPool, placement: str, teacher: str, ranks: int = 1, **overrides: Any
) -> Path:
    """The dump folder of a job of three phases with a checkpoint at every step; run once a session."""
    folder = workspace / "students" / "-".join([placement, teacher, str(ranks), *map(str, overrides.values())])
    if not (folder / "summary.json").exists():
        changes = PHASES | {
            "block_stack__placement": placement,
            "teacher__path": str(workspace / teacher),
            "checkpoint__interval": 1,
            "optimizer__lr": 0.05,  # norms must leave one, for a test to tell where they stand
        }
        rank_pool.run(run_job, ranks, args=arguments(workspace, folder, **(changes | overrides)))
    return folder


def made(
    workspace: Path, folder: Path, placement: str, blocks: int = 2, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A model-only checkpoint of random weights, norms too, with the manifest that a job would write."""
    changes = PHASES | {"block_stack__placement": placement}
    job_config = parse_config(arguments(workspace, folder, **(changes | overrides)))
    args = FLAVORS["toy"]
    args.update_from_config(job_config)
    model = BlockStackModel(dataclasses.replace(args, active_blocks=blocks, n_layers=blocks))
    with torch.no_grad():
        model.init_weights()
    randomize_norms(model)
    step = {1: 1, 2: 3, 3: 4}[blocks]
    checkpoint = folder / "checkpoint" / f"step-{step}"
    state = {k: v.to(dtype) for k, v in model.state_dict().items()}
    dcp.save(state, storage_writer=ChecksumWriter(str(checkpoint)), no_dist=True)
    data: DataIdentity = {"training": {"documents": 40, "digest": "0" * 64}}
    write_manifest(str(checkpoint), build_manifest(job_config, schedule_of(job_config), args, BlockStackModel, data))
    return checkpoint


def training_model(checkpoint: Path, placement: str, layers_per_block: int = 1) -> BlockStackModel:
    """The training model with a checkpoint's weights, built here from the flavor and the keys."""
    state = {k: v for k, v in contents(checkpoint).items() if isinstance(v, torch.Tensor) and "optimizer" not in k}
    layers = len({key.split(".")[1] for key in state if key.startswith("layers.")})
    args: BlockStackArgs = dataclasses.replace(
        FLAVORS["toy"],
        placement=placement,
        n_layers=layers,
        layers_per_block=layers_per_block,
        active_blocks=layers // layers_per_block,
        max_seq_len=SEQ_LEN,
    )
    model = BlockStackModel(args)
    model.load_state_dict(state, strict=True)
    return model.eval()


@pytest.fixture(autouse=True, scope="module")
def own_module_cache(workspace: Path) -> Iterator[None]:
    """transformers copies a folder's code to its cache: not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(workspace / "modules"))
        yield


@pytest.fixture
def user_placement() -> Iterator[None]:
    user_placements = importlib.import_module(USER)  # registers them, which no other test should see
    user_placements.remember()
    yield
    user_placements.forget()


def load(folder: Path, **kwargs) -> nn.Module:
    """As a user loads a folder; a plain Qwen3 needs no trust."""
    trust = read_json(folder / "config.json")["model_type"] != "qwen3"
    kwargs = ({"trust_remote_code": True} if trust else {}) | kwargs
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def assert_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every file opens, and the index names every tensor once, in the file that has it; returns the tensors."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(), object_pairs_hook=unique)
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                assert name not in found and index["weight_map"][name] == path.name
                found[name] = file.get_tensor(name)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """[B, S, V] of either kind of model."""
    result = model(ids, **kwargs)
    return result if isinstance(result, torch.Tensor) else result.logits
