"""The two workloads that are trained end to end, as files that a job and a hand-written loop both read.

Documents are three batches (one for the large vocabulary) of the bundled corpus, repeated, so that every repeat of a
measurement trains on the same ones. The teacher is a random Qwen3, the student starts by the plugin's own initialisation
with the teacher's embedding, head and final norm; a pre-norm student is a plain Qwen3.
"""

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from blockgrow_titan.infra import device  # noqa: F401  (before torchtitan: see there)

from blockgrow_titan.model.args import FLAVORS, BlockStackArgs  # isort: skip
from blockgrow_titan.paths import resolve  # isort: skip
from tools.benchmarks.jobs import hf_config  # isort: skip

GLOBAL_BATCH = 16
FIRST_DOCUMENT = 16
"""The documents from here on are as long as the corpus's are on average; those before are longer."""
LARGE_VOCABULARY = "tiny_large_vocabulary"
OPTIMIZER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}

_large = FLAVORS["tiny"]  # a copy
_large.vocab_size = 151_936
FLAVORS[LARGE_VOCABULARY] = _large  # in a job too: paced_job imports this module

CONFIG = """
[job]
custom_config_module = "blockgrow_titan.job_config"
[experimental]
custom_import = "tools.benchmarks.paced_job"
[model]
name = "paced_block_stack"
flavor = "{flavor}"
hf_assets_path = "{folder}/teacher"
[block_stack]
placement = "pre"
num_blocks = {student_layers}
[growth]
phase_steps = [{steps}]
[distill]
kd_weight = {kd_weight}
ce_weight = {ce_weight}
chunk_tokens = {chunk_tokens}
[teacher]
path = "{folder}/teacher"
dtype = "float32"
prefetch = {prefetch}
[training]
dataset = "jsonl"
dataset_path = "{folder}/documents.jsonl"
seq_len = {cap}
local_batch_size = {local_batch_size}
global_batch_size = {global_batch}
steps = {steps}
max_norm = {max_norm}
mixed_precision_param = "float32"
[optimizer]
name = "AdamW"
lr = {lr}
beta1 = {beta1}
beta2 = {beta2}
eps = {eps}
weight_decay = {weight_decay}
implementation = "foreach"
[lr_scheduler]
warmup_steps = 0
decay_ratio = 0.0
[checkpoint]
enable = false
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 10
[comm]
trace_buf_size = 0
[debug]
seed = {seed}
"""


@dataclass(frozen=True)
class Workload:
    """A student, a teacher, documents, and how they are trained. All values are JSON but ``folder``, which is a path."""

    name: str
    root: str
    """An existing folder that ``write`` fills."""
    flavor: str
    """Of ``FLAVORS``: everything but the depths."""
    teacher_layers: int
    student_layers: int
    batches: int
    """Global batches of documents; a window of a measurement goes through them once."""
    loop_documents: int
    """Documents of the hand-written loop's micro-batch."""
    local_batch_size: int
    chunk_tokens: int
    steps: int
    """Of the job."""
    prefetch: int = 2
    cap: int = 256
    max_norm: float = 0.5
    kd_weight: float = 0.7
    ce_weight: float = 0.3
    seed: int = 42
    tokenizer: str = "package:blockgrow_titan/assets/tokenizer"
    corpus: str = "package:blockgrow_titan/assets/corpus/austen_train.jsonl"

    @property
    def folder(self) -> Path:
        return Path(self.root)

    @property
    def args(self) -> BlockStackArgs:
        """The student's dimensions, before any job."""
        args = FLAVORS[self.flavor]
        args.placement, args.seed, args.max_seq_len = "pre", self.seed, self.cap
        args.n_layers = args.active_blocks = self.student_layers
        return args

    def texts(self) -> list[str]:
        """The documents, once ``write`` has written them."""
        return [json.loads(line)["text"] for line in (self.folder / "documents.jsonl").read_text().splitlines()]

    def lengths(self) -> list[int]:
        """Inputs, and labels, of each document."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "teacher")
        ids = tokenizer(self.texts(), add_special_tokens=False)["input_ids"]
        return [min(len(document) + 1, self.cap) - 1 for document in ids]

    def config_file(self) -> Path:
        return self.folder / "job.toml"

    def write(self) -> None:
        """Write documents, teacher, student, the job's config and ``workload.json``, which is this workload."""
        lines = Path(resolve(self.corpus)).read_text().splitlines()
        wanted = lines[FIRST_DOCUMENT : FIRST_DOCUMENT + self.batches * GLOBAL_BATCH]
        (self.folder / "documents.jsonl").write_text("".join(f"{line}\n" for line in wanted))
        self._write_models()
        values = asdict(self) | OPTIMIZER | {"folder": self.folder, "global_batch": GLOBAL_BATCH}
        self.config_file().write_text(CONFIG.format(**values))
        (self.folder / "workload.json").write_text(json.dumps(asdict(self)))

    def _write_models(self) -> None:
        from transformers import Qwen3ForCausalLM

        from blockgrow_titan.model.model import BlockStackModel
        from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter

        torch.manual_seed(self.seed)
        teacher = Qwen3ForCausalLM(hf_config(self.args, self.teacher_layers))
        teacher.save_pretrained(self.folder / "teacher")
        for path in Path(resolve(self.tokenizer)).iterdir():
            shutil.copy(path, self.folder / "teacher" / path.name)

        initial = BlockStackModel(self.args)
        with torch.no_grad():
            initial.init_weights()
        student = Qwen3ForCausalLM(hf_config(self.args, self.student_layers))
        student.load_state_dict(BlockStackStateDictAdapter(self.args).to_hf(initial.state_dict()))
        from_teacher = teacher.state_dict()
        names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        student.load_state_dict({name: from_teacher[name] for name in names}, strict=False)
        student.save_pretrained(self.folder / "student")

    def flops(self, length: int) -> tuple[float, float]:
        """FLOPs that a document of ``length`` inputs needs in a step: of the layers, and of the two heads.

        A product of [a, b] and [b, c] is 2abc. Attention counts its causal half, without recomputation. A frozen model's
        forward counts once, a trained layer three times, and the loss has four products: two heads' logits, and the
        gradients of hidden states and head.
        """
        args = self.args
        heads, kv_heads = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        weights = 2 * args.dim * heads + 2 * args.dim * kv_heads + 3 * args.dim * args.hidden_dim
        attention = 2 * 2 * heads * length * (length + 1) / 2  # scores and values, of n (n + 1) / 2 pairs
        layer = 2 * weights * length + attention
        layers = layer * (self.teacher_layers + 3 * self.student_layers)
        return layers, 4 * 2 * args.dim * args.vocab_size * length


class ProductRate:
    """FLOPs per second of the products that a workload is made of, fp32, with as many threads as torch has.

    Args:
        args: The model's dimensions.
    """

    def __init__(self, args: BlockStackArgs) -> None:
        tokens, dim, wide = 1024, args.dim, args.hidden_dim
        h, up, x = torch.randn(tokens, dim), torch.randn(wide, dim), torch.randn(tokens, wide)
        self.layer = [(h, up.t()), (x, up), (x.t(), h)]  # forward, gradient of the input, gradient of the weight
        rows = min(tokens, max(128, math.ceil(2**24 / args.vocab_size)))  # logits of 64 MiB or so
        h, head, z = torch.randn(rows, dim), torch.randn(args.vocab_size, dim), torch.empty(rows, args.vocab_size)
        self.head = [(h, head.t()), (z.normal_(), head), (z.t(), h)]
        self.outs = {id(pair): torch.mm(*pair) for pair in (*self.layer, *self.head)}

    def seconds(self, layer_flops: float, head_flops: float, spent: float = 0.5) -> float:
        """How long these FLOPs would take; measures for about twice ``spent`` seconds."""
        return layer_flops / self._rate(self.layer, spent) + head_flops / self._rate(self.head, spent)

    def _rate(self, products: list[tuple[torch.Tensor, torch.Tensor]], spent: float) -> float:
        flops = sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in products)
        done, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < spent or not done:
            for pair in products:
                torch.mm(*pair, out=self.outs[id(pair)])
            done += 1
        return flops * done / elapsed
