"""The config sections that this plugin adds to torchtitan's ``JobConfig``.

torchtitan merges this class into its own when a config says ``[job] custom_config_module =
"blockgrow_titan.job_config"``. Two traps of that merge: ``from __future__ import annotations`` here would make it
*replace* core sections instead of merging them, and a ``__post_init__`` never runs, so every check of these fields lives
in ``checks.py`` and runs once, before any process group or model exists.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers see the merged config; at run time torchtitan does the merging
    from torchtitan.config import JobConfig as TitanJobConfig
    from torchtitan.config.job_config import Checkpoint as TitanCheckpoint
    from torchtitan.config.job_config import Comm as TitanComm
    from torchtitan.config.job_config import Training as TitanTraining
else:
    TitanJobConfig = TitanCheckpoint = TitanComm = TitanTraining = object


class ConfigError(Exception):
    """A mistake of the user's; its text is all that the console shows."""


@dataclass
class Checkpoint(TitanCheckpoint):
    last_save_model_only: bool = False
    """
    As in torchtitan, but off by default, so that the last step's checkpoint is as whole as the others.
    """


@dataclass
class Training(TitanTraining):
    max_skipped_steps: int = 10
    """
    A step whose loss or gradient norm is not finite changes no weight, on any rank; more than this many in a row end the
    job. 0: the first one does.
    """


@dataclass
class Comm(TitanComm):
    heartbeat_timeout_seconds: int = 60
    """
    A process that shows no sign of life for this long ends the job with its name: one that is stopped, or whose machine
    or network is down. Compile, validation, saves and growth take as long as they need; they do not stop heartbeats.
    """


@dataclass
class BlockStack:
    placement: str = "post"
    """Norm placement of every decoder layer and of the model boundary: a name in `model.placement.PLACEMENTS`."""
    num_blocks: int = 3
    """K: the blocks of the finished student. `growth.active_blocks` may never exceed it."""
    layers_per_block: int = 1
    """L: the decoder layers of one block; the finished student has `num_blocks * layers_per_block` layers."""


@dataclass
class Growth:
    phase_steps: list[int] = field(default_factory=list)
    """
    Training steps of each phase; their sum is `training.steps`. Empty means one phase over all of `training.steps`.
    """
    active_blocks: list[int] = field(default_factory=list)
    """
    Active blocks in each phase: never falling, each from 1 to `block_stack.num_blocks`. Empty means all blocks in every
    phase. Joint training is one phase, [3]; joint with learning-rate restarts is [3, 3, 3].
    """
    freeze: str = "none"
    """
    What stops training at a phase change:
    - 'none': every active block keeps training
    - 'completed_blocks': the blocks that were active in the previous phase are frozen
    """
    train_boundary: bool = True
    """
    Under `freeze = "completed_blocks"`, whether the language-modelling head and the boundary norm stay trainable after
    the first phase. The paper does not say; true follows its Algorithm 1.
    """
    optimizer_at_growth: str = "reset"
    """
    Optimizer state at a phase change:
    - 'reset': all moments start from zero (the paper)
    - 'keep': moments of carried parameters survive
    """
    lr_at_growth: str = "restart"
    """
    Learning-rate schedule at a phase change:
    - 'restart': warmup and decay over each phase's own steps (the paper)
    - 'continue': one schedule over `training.steps`
    """
    data_at_growth: str = "continue"
    """
    Position in the documents at a phase change:
    - 'continue': the next step's documents follow the last one's (the paper)
    - 'rewind': every phase starts from the first document
    """
    new_block_init: str = "random"
    """
    How a new block starts:
    - 'random': Qwen3's initialisation, a function of seed, FQN and shape alone
    """
    keep_boundary_checkpoints: bool = True
    """
    Whether the checkpoints of the phases' last steps stay: `checkpoint.keep_latest_k` then neither counts nor removes them.
    """
    hooks: list[str] = field(default_factory=list)
    """Extra phase hooks as `module:Class`, run after the train spec's own, in this order."""
    start_phase: int = 0
    """Not a setting: the trainer writes here which phase the checkpoint that it resumes belongs to."""


@dataclass
class Distill:
    kd_weight: float = 0.7
    """alpha: weight of tau^2 * KL(teacher || student). Must be 0 without a teacher."""
    ce_weight: float = 0.3
    """gamma: weight of the next-token cross-entropy."""
    temperature: float = 1.0
    """tau: softmax temperature of both distributions in the KL term."""
    chunk_tokens: int = 1024
    """
    Tokens whose logits exist at one time; [chunk_tokens, vocabulary] is the largest logits tensor. Changes memory and
    speed, never the result.
    """


@dataclass
class Teacher:
    path: str = ""
    """
    Hugging Face folder of the Qwen3 teacher, or `package:blockgrow_titan/...` for a bundled one. Empty: no teacher; the
    embedding is then trained too.
    """
    ranks: int = -1
    """
    Ranks of the teacher's own world, taken from the end of the job's ranks. -1: half of the ranks, rounded down, at
    least one. 0: the teacher runs on the student's ranks. Ignored without a teacher.
    """
    shard_degree: int = 1
    """Teacher ranks that share one copy of the teacher by FSDP; 1: each rank holds a full copy."""
    dtype: str = "bfloat16"
    """Data type of the teacher's weights and of the hidden states on the wire: 'bfloat16' or 'float32'."""
    prefetch: int = 2
    """Micro-batches that the teacher may work on ahead of the student; 0: none."""
    timeout_seconds: int = 600
    """
    An answer overdue by this long ends the job with the rank's name. A student that takes its time between requests never
    counts as overdue. A teacher that is gone or stopped is noticed sooner: `comm.heartbeat_timeout_seconds`.
    """


@dataclass
class Documents:
    text_column: str = "text"
    """Field of a record that holds the document's text."""
    end_of_document: str = "<|endoftext|>"
    """Token that ends every document; must be in the tokenizer."""
    shard_documents: int = -1
    """Train on the first N documents, again and again; -1: on all of them."""
    held_out_documents: int = 4833
    """
    Of a dataset that holds both sets (`fineweb_edu`): the first documents, which validation uses and training never sees;
    training document 0 is the one after them. 4,833 is the paper's number.
    """
    micro_batching: str = "packed"
    """
    How the documents of a step are dealt to ranks and micro-batches; never which documents a step holds:
    - 'packed': documents lie end to end in one row, of `local_batch_size * seq_len` tokens at most; positions restart and
      attention sees no other document, so each is computed as if alone
    - 'balanced': documents of near-equal length together, right-padded, as many padded tokens at most
    - 'count': `local_batch_size` documents in their order, right-padded, as torchtitan cuts them
    The first two deal equal work to the ranks, with the same number of micro-batches on each.
    """
    pad_to_multiple_of: int = -1
    """
    Rows are padded to a length that is a multiple of this, a divisor of `seq_len`. -1: 1, and under `compile.enable` the
    largest one up to 128, so that few shapes are compiled.
    """
    on_bad_document: str = "stop"
    """
    What a record that cannot be read does:
    - 'stop': end the job, naming file and line
    - 'skip': count as an empty document, with a warning
    """


@dataclass
class Diagnostics:
    enable: bool = False
    """
    At each validation, look inside the student (residual RMS, token types, block removal, logit lens, gradient norms) and
    write a line of `diagnostics.jsonl`. Changes nothing in the training. Needs `validation.enable`.
    """
    tokens: int = -1
    """
    Tokens of the fixed batch of held-out documents that it looks at. -1: twice `validation.seq_len`, 2 x 2048 (the
    paper's batch) at most.
    """


@dataclass
class JobConfig(TitanJobConfig):
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    training: Training = field(default_factory=Training)
    comm: Comm = field(default_factory=Comm)
    block_stack: BlockStack = field(default_factory=BlockStack)
    growth: Growth = field(default_factory=Growth)
    distill: Distill = field(default_factory=Distill)
    teacher: Teacher = field(default_factory=Teacher)
    documents: Documents = field(default_factory=Documents)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
