"""The chunked objective against what it replaces, forward and backward, on two threads or on the GPU.

Each way gets the same hidden states, heads and labels: the four matrix products that no way can do without, whole logits
with autograd, and the chunked divergences of TRL (``pip install trl==1.16``) and, on CUDA, of Liger-Kernel
(``pip install liger-kernel``); those two compute the KL term alone and are left out where they are not installed.

Memory is counted twice on a CPU. The bytes of tensors that operations return are exact and repeat, but what an operation
allocates and frees inside itself is not among them; so the resident set of a fresh process, which holds everything, is
given beside them. On CUDA the allocator's own peak is both.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockgrow_titan.distill.objective import Objective, chunked_distillation
from tools.benchmarks import rows
from tools.benchmarks.jobs import synchronize
from tools.benchmarks.ranks import run_ranks
from tools.benchmarks.rows import Row

SUBJECT = "objective"
KD_WEIGHT, CE_WEIGHT = 0.7, 0.3
THREADS = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Sizes(NamedTuple):
    """Tokens, hidden size of both models, vocabulary."""

    tokens: int
    dim: int
    vocab: int


# On a GPU, one sequence of a student of Qwen3-8B's dimensions.
SIZES = {"cpu": Sizes(1024, 256, 151_936), "cuda": Sizes(8192, 4096, 151_936)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
CHUNK_TOKENS = {"cpu": 192, "cuda": 1024}  # of the shipped small configs, and the default
GRADIENT_TOKENS = 64  # for which float64 logits of the whole vocabulary, several times over, still fit

Losses = dict[str, float]
Way = Callable[["Case"], Losses]


@dataclass
class Case:
    """What every way is given: [N, D] hidden states, [V, D] heads, [N] labels; student tensors want gradients."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    teacher_hidden: Tensor
    teacher_head: Tensor

    def take(self, chosen: slice) -> "Case":
        """The same heads and some of the tokens."""
        hidden = self.hidden[chosen].detach().requires_grad_()
        return Case(hidden, self.weight, self.labels[chosen], self.teacher_hidden[chosen], self.teacher_head)

    def to(self, dtype: torch.dtype) -> "Case":
        tensors = (t.detach().to(dtype) if t.is_floating_point() else t for t in vars(self).values())
        return Case(*tensors).wanting_gradients()

    def wanting_gradients(self) -> "Case":
        self.hidden.requires_grad_()
        self.weight.requires_grad_()
        return self

    def forget_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


def make_case(sizes: Sizes, dtype: torch.dtype | None = None, device: str = DEVICE) -> Case:
    """Random tensors, whose logits have a standard deviation of 2: peaked, as a trained model's are."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device}

    def normal(rows: int, deviation: float = 1.0) -> Tensor:
        return (torch.randn(rows, sizes.dim, **options) * deviation).to(dtype or DTYPES[device])

    head_deviation = 2 / sizes.dim**0.5
    return Case(
        normal(sizes.tokens),
        normal(sizes.vocab, head_deviation),
        torch.randint(sizes.vocab, (sizes.tokens,), **options),
        normal(sizes.tokens),
        normal(sizes.vocab, head_deviation),
    ).wanting_gradients()


def chunked(case: Case, chunk_tokens: int | None = None, scale: float = 1.0) -> Losses:
    """This package's objective."""
    objective = Objective(KD_WEIGHT, CE_WEIGHT, 1.0, chunk_tokens or CHUNK_TOKENS[case.hidden.device.type])
    sums = chunked_distillation(
        case.hidden, case.weight, case.labels, case.teacher_hidden, case.teacher_head, objective, scale
    )
    sums.loss.backward()
    return {"ce": sums.ce.item(), "kl": sums.kl.item()}


def full_logits(case: Case) -> Losses:
    """Whole logits and autograd, as one would write it, with the student's softmax taken once for both terms."""
    log_p = (case.hidden @ case.weight.T).log_softmax(-1, dtype=_softmax_dtype(case))
    with torch.no_grad():
        log_q = (case.teacher_hidden @ case.teacher_head.T).log_softmax(-1, dtype=_softmax_dtype(case))
    kl = F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    ce = F.nll_loss(log_p, case.labels, reduction="sum")
    (KD_WEIGHT * kl + CE_WEIGHT * ce).backward()
    return {"ce": ce.item(), "kl": kl.item()}


def trl(case: Case) -> Losses:
    """TRL's chunked divergence at beta = 0, the forward KL."""
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    divergence, _ = function.apply(case.hidden, case.weight, None, case.teacher_hidden, case.teacher_head, None, 0.0)
    kl = divergence.sum()
    kl.backward()
    return {"kl": kl.item()}


def liger(case: Case) -> Losses:
    """Liger-Kernel's fused linear divergence at beta = 0, the forward KL averaged over tokens."""
    module = importlib.import_module("liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD
    kl = module(jsd_beta=0.0)(case.hidden, case.weight, case.teacher_hidden, case.teacher_head)
    kl.backward()
    return {"kl": kl.item() * len(case.labels)}


WAYS: dict[str, Way] = {"chunked": chunked, "full logits": full_logits, "TRL": trl, "Liger-Kernel": liger}


def ways() -> dict[str, Way]:
    """The ways that can run here; says which cannot."""
    found = dict(WAYS)
    for name, package, possible in (("TRL", "trl", True), ("Liger-Kernel", "liger_kernel", DEVICE == "cuda")):
        if not possible or importlib.util.find_spec(package) is None:
            reason = f"{package} is not installed" if possible else "it needs CUDA"
            print(f"  {SUBJECT}: no row for {name}: {reason}", file=sys.stderr)
            del found[name]
    return found


def products(case: Case, chunk_tokens: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that takes the four matrix products alone, in chunks, into memory that is there before.

    In place of a gradient it takes the student's logits; it returns the last two products, [N, D] and [V, D].
    """
    hidden, weight, teacher_hidden, teacher_head = (
        t.detach() for t in (case.hidden, case.weight, case.teacher_hidden, case.teacher_head)
    )
    logits, teacher_logits = (hidden.new_zeros(min(chunk_tokens, len(hidden)), len(weight)) for _ in range(2))
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)

    def run() -> tuple[Tensor, Tensor]:
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, len(hidden)))
            z, z_t = (buffer[: chunk.stop - start] for buffer in (logits, teacher_logits))  # [C, V]
            torch.mm(hidden[chunk], weight.t(), out=z)
            torch.mm(teacher_hidden[chunk], teacher_head.t(), out=z_t)
            torch.mm(z, weight, out=grad_hidden[chunk])
            grad_weight.addmm_(z.t(), hidden[chunk], beta=1 if start else 0)
        return grad_hidden, grad_weight

    return run


def _softmax_dtype(case: Case) -> torch.dtype:
    return torch.promote_types(case.hidden.dtype, torch.float32)


def _repeatable(way: Callable[[Case], object], case: Case) -> Callable[[], None]:
    """A function that runs a way from a state without gradients, and ends when the device has."""

    def run() -> None:
        case.forget_gradients()
        way(case)
        synchronize()

    return run


def _peak(run: Callable[[], object], case: Case) -> int:
    """Bytes that a run on a case takes beyond what was there before."""
    case.forget_gradients()
    if DEVICE == "cpu":
        return rows.tensor_peak(run, *vars(case).values())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def resident_peak(rank: int, world_size: int, way: str, sizes: Sequence[int]) -> int:
    """Bytes by which one run of a way raises the peak of this process's resident set; for ``run_ranks``."""
    WAYS[way](make_case(Sizes(8, 8, 64)))  # imports, and the libraries' own buffers
    case = make_case(Sizes(*sizes))
    before = _resident("VmRSS")
    WAYS[way](case)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """Bytes of this process's resident set: now (VmRSS) or at most (VmHWM). Not ``getrusage``: that has the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def run(sizes: Sizes | None = None, repeats: int = rows.REPEATS) -> Iterator[Row]:
    """Times, memory and numerics.

    Args:
        sizes: Those of the bars by default.
        repeats: Measurements of each way.
    """
    sizes = sizes or SIZES[DEVICE]
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, THREADS))
    try:
        case = make_case(sizes)
        found = ways()
        yield from _losses(case, found)
        yield from _times(case, found, repeats)
        yield from _memory(case, found, sizes)
        del case
        yield from _numerics(sizes)
    finally:
        torch.set_num_threads(threads)


def _losses(case: Case, found: dict[str, Way]) -> Iterator[Row]:
    expected = full_logits(case)
    for name, way in found.items():
        case.forget_gradients()
        if name == "full logits":
            continue
        terms = way(case)
        error = max(abs(value / expected[term] - 1) for term, value in terms.items())
        note = f"{' and '.join(term.upper() for term in terms)} of full logits"
        bar = 1e-5 if case.hidden.dtype == torch.float32 else 1e-2
        yield rows.at_most(SUBJECT, f"relative difference of the loss, {name}", error, "", bar, note)
    case.forget_gradients()


def _times(case: Case, found: dict[str, Way], repeats: int) -> Iterator[Row]:
    chunk_sizes = {CHUNK_TOKENS[DEVICE], len(case.labels)}
    runs = {name: _repeatable(way, case) for name, way in found.items()}
    for size in chunk_sizes:
        four = products(case, size)
        runs[f"products, {size} tokens at a time"] = _repeatable(lambda _, four=four: four(), case)  # type: ignore[misc]
    seconds = rows.interleaved(runs, repeats)
    floor = min((name for name in seconds if name.startswith("products")), key=lambda name: median(seconds[name]))
    device = f"{torch.get_num_threads()} threads" if DEVICE == "cpu" else DEVICE
    shape = f"N={len(case.labels)}, D={case.weight.shape[1]}, V={len(case.weight)}, {case.weight.dtype}, {device}"
    for name, values in seconds.items():
        yield Row(SUBJECT, f"time, {name}", median(values), "s", note=shape.replace("torch.", ""))
    ours = seconds["chunked"]
    yield rows.at_most(
        SUBJECT, "time over its four matrix products", rows.median_ratio(ours, seconds[floor]), "x", 1.35, floor
    )
    for name, bar in (("full logits", 1.4), ("TRL", 1.8)):
        if name in seconds:
            ratio = rows.median_ratio(seconds[name], ours)
            yield rows.at_least(SUBJECT, f"times faster than {name}", ratio, "x", bar, _kl_alone(name))
    if "Liger-Kernel" in seconds:
        ratio = rows.median_ratio(seconds["Liger-Kernel"], ours)
        yield Row(SUBJECT, "times faster than Liger-Kernel", ratio, "x", note=_kl_alone("Liger-Kernel"))


def _kl_alone(name: str) -> str:
    return "" if name == "full logits" else "which computes the KL alone"


def _memory(case: Case, found: dict[str, Way], sizes: Sizes) -> Iterator[Row]:
    peaks = {name: _peak(_repeatable(way, case), case) for name, way in found.items()}
    case.forget_gradients()
    for name, peak in peaks.items():
        yield Row(SUBJECT, f"extra memory, {name}", peak / 2**20, "MiB", note="gradients included")
    for name, bar in (("full logits", 1 / 6), ("TRL", 1 / 2)):
        if name in peaks:
            yield rows.at_most(SUBJECT, f"extra memory over that of {name}", peaks["chunked"] / peaks[name], "x", bar)
    if sys.platform == "linux" and DEVICE == "cpu":
        for name in found:
            (extra,) = run_ranks(
                "tools.benchmarks.objective:resident_peak", 1, torch.get_num_threads(), way=name, sizes=sizes
            )
            yield Row(SUBJECT, f"extra resident memory, {name}", extra / 2**20, "MiB", note="of a fresh process")
    few, many = (_peak(partial(_micro_batches, case, count), case) for count in (2, 8))
    case.forget_gradients()
    yield rows.at_most(SUBJECT, "peak of 8 micro-batches over that of 2", many / few, "x", 1.001)


def _micro_batches(case: Case, count: int) -> None:
    """``count`` micro-batches of an eighth of the tokens each, whose gradients accumulate."""
    case.forget_gradients()
    size = len(case.labels) // 8
    for index in range(count):
        chunked(case.take(slice(index * size, (index + 1) * size)))


def _numerics(sizes: Sizes) -> Iterator[Row]:
    """Against float64, in float32 whatever the device's dtype is."""
    case = make_case(sizes._replace(tokens=min(sizes.tokens, GRADIENT_TOKENS)), torch.float32)
    note = f"{len(case.labels)} tokens, float32"
    exact = case.to(torch.float64)
    full_logits(exact)
    chunked(case, 16)
    error = max(_distance(getattr(case, name).grad, getattr(exact, name).grad) for name in ("hidden", "weight"))
    yield rows.at_most(SUBJECT, "gradients, relative distance from float64 autograd", error, "", 1e-5, note)
    del exact

    differences: list[float] = []
    for chunk_tokens in (len(case.labels), len(case.labels) // 2, 7, 4, 1):
        case.forget_gradients()
        terms = chunked(case, chunk_tokens)
        if not differences:
            whole, whole_terms = (case.hidden.grad, case.weight.grad), terms
        differences += [abs(terms[term] / value - 1) for term, value in whole_terms.items()]
        differences += [_distance(case.hidden.grad, whole[0]), _distance(case.weight.grad, whole[1])]
    yield rows.at_most(SUBJECT, "largest difference between chunk sizes", max(differences), "", 1e-6, note)

    case.forget_gradients()
    with torch.no_grad():
        for hidden, head in ((case.hidden, case.weight), (case.teacher_hidden, case.teacher_head)):
            logits = hidden @ head.T
            hidden *= 300 / (logits.amax(-1, keepdim=True) - logits.amin(-1, keepdim=True))
    losses = torch.tensor(list(chunked(case).values()))
    bad = sum(
        int((~values.isfinite()).sum()) for values in (losses, case.hidden.grad, case.weight.grad) if values is not None
    )
    yield rows.at_most(SUBJECT, "values that are not finite at a logit spread of 300", bad, "", 0, note)


def _distance(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None and expected is not None
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
