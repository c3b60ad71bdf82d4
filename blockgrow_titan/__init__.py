"""blockgrow_titan: Qwen3 block-stack students that grow in depth while they are distilled, for torchtitan.

``[experimental] custom_import = "blockgrow_titan"`` loads this module, which registers the train spec
``qwen3_block_stack``. Nothing heavy is imported before that.
"""

from blockgrow_titan.infra import device  # noqa: F401  (before torchtitan: see there)

from torchtitan.components.lr_scheduler import build_lr_schedulers  # isort: skip
from torchtitan.components.optimizer import build_optimizers  # isort: skip
from torchtitan.protocols.train_spec import register_train_spec  # isort: skip

from blockgrow_titan.infra.parallelize import parallelize_block_stack
from blockgrow_titan.metrics import build_growth_metrics_processor
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.model.model import BlockStackModel
from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter
from blockgrow_titan.spec import GrowthTrainSpec, build_document_dataloader, build_objective, build_tokenizer
from blockgrow_titan.validate import GrowthValidator

MODEL_NAME = "qwen3_block_stack"

__all__ = ["FLAVORS", "MODEL_NAME", "BlockStackModel", "GrowthTrainSpec", "get_train_spec"]


def get_train_spec() -> GrowthTrainSpec:
    """What a run of ``model.name = "qwen3_block_stack"`` is built from."""
    return GrowthTrainSpec(
        model_cls=BlockStackModel,
        model_args=FLAVORS,
        parallelize_fn=parallelize_block_stack,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_document_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_objective,
        build_validator_fn=GrowthValidator,
        build_metrics_processor_fn=build_growth_metrics_processor,
        state_dict_adapter=BlockStackStateDictAdapter,
    )


register_train_spec(MODEL_NAME, get_train_spec())
