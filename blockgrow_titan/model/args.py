"""Model arguments: torchtitan's Qwen3 dimensions plus what a growing block stack needs to know about its phase."""

from dataclasses import dataclass, fields, replace

from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from blockgrow_titan.growth.schedule import Phase, schedule_of
from blockgrow_titan.job_config import JobConfig

DENSE_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")


@dataclass
class BlockStackArgs(Qwen3ModelArgs):
    """A Qwen3 stack of ``active_blocks`` blocks with ``layers_per_block`` decoder layers each, as one phase trains it.

    ``n_layers`` follows from the two; the other inherited fields are the flavor's dimensions. Everything that differs
    between phases is here, so that the model of a phase is a function of its arguments alone.
    """

    placement: str = "post"
    layers_per_block: int = 1
    active_blocks: int = 1
    frozen_blocks: int = 0
    train_embedding: bool = False
    train_boundary: bool = True
    init_std: float = 0.02
    seed: int = 0

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        """Fill in what the job config decides, for the phase ``growth.start_phase``."""
        self.max_seq_len = job_config.training.seq_len
        self.placement = job_config.block_stack.placement
        self.layers_per_block = job_config.block_stack.layers_per_block
        self.train_embedding = not job_config.teacher.path
        self.seed = job_config.debug.seed or 0
        phase = schedule_of(job_config).phases[job_config.growth.start_phase]
        self._set_phase(phase, job_config.growth.train_boundary)

    def _set_phase(self, phase: Phase, train_boundary: bool) -> None:
        self.active_blocks = phase.active_blocks
        self.frozen_blocks = phase.frozen_blocks
        self.n_layers = self.active_blocks * self.layers_per_block
        self.train_boundary = train_boundary or self.frozen_blocks == 0

    def for_phase(self, phase: Phase, job_config: JobConfig) -> "BlockStackArgs":
        """The same model at ``phase``, as a copy."""
        args = replace(self)
        args._set_phase(phase, job_config.growth.train_boundary)
        return args

    @property
    def attention_tokens(self) -> float:
        """Length of a document at which causal attention takes as many FLOPs as a layer's products with its weights."""
        heads, kv_heads = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        weights = 2 * self.dim * heads + 2 * self.dim * kv_heads + 3 * self.dim * self.hidden_dim
        return weights / heads  # 2 * weights a token, against 2 * heads * n for n / 2 keys on average

    def block_of_layer(self, layer: int) -> int:
        return layer // self.layers_per_block


class Flavors(dict[str, BlockStackArgs]):
    """Flavor name -> arguments; every look-up gives a fresh copy, since ``update_from_config`` writes into it."""

    def __getitem__(self, name: str) -> BlockStackArgs:
        if name not in self:
            raise ValueError(f'model.flavor is "{name}"; it must be one of {", ".join(self)}')
        return replace(super().__getitem__(name))


def _dense(size: str) -> BlockStackArgs:
    """Published dimensions of a dense Qwen3, as torchtitan holds them; a student's head is never tied."""
    values = {f.name: getattr(qwen3_args[size], f.name) for f in fields(Qwen3ModelArgs)}
    return BlockStackArgs(**(values | {"enable_weight_tying": False}))


FLAVORS = Flavors(
    tiny=BlockStackArgs(
        vocab_size=4096, dim=256, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=768, max_seq_len=256
    ),
    **{size: _dense(size) for size in DENSE_SIZES},
)
