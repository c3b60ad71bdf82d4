"""Parameter names between this model and Hugging Face's Qwen3."""

from typing import Any

from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.placement import PLACEMENTS


class BlockStackStateDictAdapter(Qwen3StateDictAdapter):
    """torchtitan's Qwen3 adapter, for the student's own depth and placement.

    The base class would take the file of each tensor from the index in the assets folder, which is the teacher's and has
    another depth: a student is written as one file instead.
    """

    model_args: BlockStackArgs

    def __init__(self, model_args: BlockStackArgs, hf_assets_path: str | None = None) -> None:
        super().__init__(model_args, None)
        self.model_args = model_args
        self.fqn_to_index_mapping = None

    def hf_name(self, fqn: str) -> str:
        """Hugging Face's name of a tensor, whatever the placement.

        Qwen3's modules have Qwen3's names; what a placement adds to its layer keeps its own, under ``model.layers.N``.
        """
        modules = {
            ours.removesuffix(".weight"): theirs.removesuffix(".weight")
            for theirs, ours in self.from_hf_map.items()
            if ours is not None
        }
        parts = fqn.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        if layer:
            parts[1] = "{}"
        for end in range(len(parts), 0, -1):
            if known := modules.get(".".join(parts[:end])):
                return ".".join([known, *parts[end:]]).format(layer)
        return ".".join(["model", *parts]).format(layer)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face names for a state dict.

        Raises:
            NotImplementedError: If the placement is not Qwen3's own: torchtitan writes tensors only, and the folder would
                load as another model.
        """
        if not PLACEMENTS[self.model_args.placement].is_qwen3:
            raise NotImplementedError(
                f'block_stack.placement is "{self.model_args.placement}": checkpoint.last_save_in_hf writes tensors alone, '
                "which only a pre-norm student, a plain Qwen3, can be loaded from. Set it to false, and export the "
                "checkpoint with: python -m tools.convert_hf to-hf CHECKPOINT OUT"
            )
        return super().to_hf(state_dict)
