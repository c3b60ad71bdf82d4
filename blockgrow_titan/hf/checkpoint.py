"""A checkpoint folder as export and verification see it: names, shapes, dtypes, and tensors on demand.

Two kinds are read, both torch's distributed checkpoints (DCP): a student's ``.../checkpoint/step-N`` with its manifest, at
any step, and a converted teacher with Hugging Face's ``config.json`` beside it (``teacher/files.py``). Opening reads
metadata only; ``read`` verifies the files once and brings the tensors that are asked for, whole, on the CPU. Nothing here
is collective.
"""

import importlib
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpoint import TRAIN_STATE

from blockgrow_titan.checkpoint import OTHER_STATES
from blockgrow_titan.checkpoint_files import METADATA, damaged, find_damage
from blockgrow_titan.checkpoint_io import CheckpointReader, load_checkpoint
from blockgrow_titan.growth.manifest import FILE_NAME, MODEL_DIMENSIONS, read_manifest
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.model import BlockStackModel
from blockgrow_titan.model.placement import PLACEMENTS, DecoderLayer
from blockgrow_titan.teacher.files import CONFIG, TeacherFiles, open_teacher

STEP = f"{TRAIN_STATE}.step"


class StudentCheckpoint:
    """A checkpoint of a block stack: its manifest says what the model is, its keys how deep.

    Args:
        folder: The ``.../checkpoint/step-N`` folder.
        custom_import: Module that registers the placement; None for the manifest's.

    Attributes:
        shapes: FQN -> shape of every model tensor.
        dtypes: FQN -> dtype as stored.
        layers: Number of decoder layers that it holds.
        manifest: As written by the run.
        step: The training step: as stored, else (a model-only checkpoint) by the folder's name, else None.
        phase: The manifest's entry of the phase that the checkpoint belongs to.
        args: Model arguments at this depth.
        layer_cls: The placement's class.

    Raises:
        ValueError: If the folder is not a whole checkpoint, its depth is no phase's, or the placement is not known.
    """

    def __init__(self, folder: str | Path, custom_import: str | None = None) -> None:
        self.folder = _checked(folder)
        self._verified = False
        self.manifest = read_manifest(str(self.folder))
        self._read_metadata()
        config = self.manifest["config"]
        placement, self.layers_per_block = config["block_stack.placement"], config["block_stack.layers_per_block"]
        self.phase = self._find_phase()
        self.layer_cls = find_placement(placement, custom_import or self.manifest["custom_import"], str(self.folder))
        self.args = BlockStackArgs(
            **{name: self.manifest["model"][name] for name in MODEL_DIMENSIONS},
            n_layers=self.layers,
            placement=placement,
            layers_per_block=self.layers_per_block,
            active_blocks=self.phase["active_blocks"],
        )

    def _read_metadata(self) -> None:
        self._check_files(sizes_only=True)
        entries = CheckpointReader(self.folder).read_metadata().state_dict_metadata
        model = {
            fqn: entry
            for fqn, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and not fqn.startswith(OTHER_STATES)
        }
        self.shapes = {fqn: entry.size for fqn, entry in model.items()}
        self.dtypes = {fqn: entry.properties.dtype for fqn, entry in model.items()}
        found = sorted({int(match[1]) for fqn in model if (match := re.match(r"layers\.(\d+)\.", fqn))})
        self.layers = len(found)
        if not found or found != list(range(self.layers)):
            raise ValueError(
                f"{self.folder} holds the decoder layers {found}, which are not a whole stack: use a checkpoint as this "
                "plugin's jobs write it"
            )
        name = re.fullmatch(r"step-(\d+)", self.folder.name)
        self.step = int(name[1]) if name else None
        if STEP in entries:
            state: dict[str, Any] = {STEP: None}
            self._load(state)
            self.step = int(state[STEP])

    def read(self, fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """These tensors, whole, on the CPU in their stored dtype, however many ranks wrote them.

        Raises:
            ValueError: If a file of the checkpoint is absent, cut off or altered.
        """
        self._verify()
        state: dict[str, Any] = {fqn: torch.empty(self.shapes[fqn], dtype=self.dtypes[fqn]) for fqn in fqns}
        self._load(state)
        return state

    def _check_files(self, sizes_only: bool) -> None:
        """Refuse files that are not as they were written; the manifest, which is text and checked as it is read, may be."""
        if problems := find_damage(str(self.folder), except_for=(FILE_NAME,), sizes_only=sizes_only):
            raise damaged(str(self.folder), problems, resumes=False)

    def _verify(self) -> None:
        """Read every file once to compare it with its checksum, before the first tensor is taken from any."""
        if not self._verified:
            self._check_files(sizes_only=False)
            self._verified = True

    def _load(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
            try:
                load_checkpoint(state, self.folder, no_dist=True)
            except ValueError:
                self._verify()  # names the file, if it is one
                raise

    def _find_phase(self) -> dict[str, Any]:
        phases = self.manifest["phases"]
        fitting = [phase for phase in phases if phase["active_blocks"] * self.layers_per_block == self.layers]
        step = self.step
        if step is not None:
            fitting = [phase for phase in fitting if phase["first_step"] <= step <= phase["last_step"]]
        if not fitting:
            depths = ", ".join(
                f"{phase['active_blocks'] * self.layers_per_block} in steps {phase['first_step']} to {phase['last_step']}"
                for phase in phases
            )
            raise ValueError(
                f"{self.folder} holds {self.layers} layers{'' if step is None else f' at step {step}'}, but the phases of its "
                f"{FILE_NAME} have {depths}: the two belong to different runs; use a checkpoint as its run wrote it"
            )
        return fitting[-1]  # without a step it is a model-only checkpoint, which only the end of a run writes

    def build(self) -> BlockStackModel:
        """The training model, unsharded, fp32, on the CPU, in eval mode.

        Raises:
            ValueError: If a file is damaged, or the tensors are not those of the model.
        """
        with torch.device("meta"):
            model = BlockStackModel(self.args)
        shapes = {fqn: param.shape for fqn, param in model.state_dict().items()}
        if shapes != self.shapes:
            different = sorted(fqn for fqn in shapes.keys() | self.shapes if shapes.get(fqn) != self.shapes.get(fqn))
            raise ValueError(
                f'{self.folder} does not hold the tensors of placement "{self.args.placement}": {different[0]} and '
                f"{len(different) - 1} more differ; register the placement as it was when the student was trained"
            )
        model.float().to_empty(device="cpu")
        self._verify()
        state = model.state_dict()
        self._load(state)
        model.load_state_dict(state)
        model.init_buffers()
        return model.requires_grad_(False).eval()


def open_checkpoint(folder: str | Path, custom_import: str | None = None) -> StudentCheckpoint | TeacherFiles:
    """A student's checkpoint if the folder has a manifest, a converted teacher if it has a ``config.json``.

    Raises:
        ValueError: If it is neither, or not whole.
    """
    path = _checked(folder)
    if (path / FILE_NAME).is_file():
        return StudentCheckpoint(path, custom_import)
    if (path / CONFIG).is_file():
        return open_teacher(str(path))
    raise ValueError(
        f"{path} has neither {FILE_NAME} (a student's checkpoint) nor {CONFIG} (a teacher converted by from-hf): give a "
        "folder as one of the two wrote it"
    )


def find_placement(name: str, custom_import: str, where: str) -> type[DecoderLayer]:
    """The class of a placement, after importing the module that registers it.

    Raises:
        ValueError: If the module cannot be imported or does not register the placement.
    """
    try:
        if custom_import:
            importlib.import_module(custom_import)
    except Exception as error:  # a user's module may fail in any way
        raise ValueError(
            f'"{custom_import}", to be imported for {where} (its experimental.custom_import, or --import), cannot be imported '
            f"({_one_line(error)}): put it on PYTHONPATH, or name the module that registers the placement with --import"
        ) from error
    if name not in PLACEMENTS:
        raise ValueError(
            f'{where} has placement "{name}", which "{custom_import}" does not register (known: {", ".join(PLACEMENTS)}): '
            "name the module that does with --import"
        )
    return PLACEMENTS[name]


def _checked(path: str | Path) -> Path:
    """The absolute path of a folder that has DCP's metadata, which is written last; anything else is refused."""
    folder = Path(path).expanduser().absolute()
    if (folder / METADATA).is_file():
        return folder
    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        advice = "give the .../checkpoint/step-N folder of a run, or what from-hf wrote"
    elif any(folder.glob("*.safetensors")):
        what, advice = "a folder of safetensors, not a checkpoint", "it is in Hugging Face's format already"
    elif any(folder.glob("*.distcp")) or (folder / FILE_NAME).is_file():
        what, advice = f"half-written (it has no {METADATA})", "use an earlier checkpoint"
    else:
        what = "not a checkpoint"
        inside = sorted(path.parent.name for path in folder.glob(f"step-*/{METADATA}"))
        advice = (
            f"give one of those in it: {', '.join(inside)}"
            if inside
            else "give the .../checkpoint/step-N folder of a run"
        )
    raise ValueError(f"{folder} is {what}: {advice}")


def _one_line(error: BaseException) -> str:
    """The essence of an error of torch's, which may run over many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__
