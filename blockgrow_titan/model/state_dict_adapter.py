"""Parameter names between this model and Hugging Face's Qwen3."""

from typing import Any

from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from blockgrow_titan.model.args import BlockStackArgs


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

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face names for a state dict.

        Raises:
            NotImplementedError: If the placement is not Qwen3's own: the folder would load as another model.
        """
        if self.model_args.placement != "pre":
            raise NotImplementedError(
                f'block_stack.placement is "{self.model_args.placement}": only a pre-norm student is a plain Qwen3 that '
                "Hugging Face's format can hold. Keep checkpoint.last_save_in_hf = false"
            )
        return super().to_hf(state_dict)
