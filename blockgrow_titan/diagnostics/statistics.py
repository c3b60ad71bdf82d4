"""Numbers of one tensor, in float64: what a boundary's residual stream and a block's effect on it are summed up by.

None stands for a number that is not defined or not finite, since JSON has no NaN.
"""

import math
from typing import Any

import torch
from torch import Tensor

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

BINS_PER_DECADE, LOWEST_DECADE, HIGHEST_DECADE = 16, -4, 4
RMS_BINS = BINS_PER_DECADE * (HIGHEST_DECADE - LOWEST_DECADE)
"""Bins of every histogram, evenly spaced in log10 from 1e-4 to 1e4: the same at every step, boundary and run."""


def bin_edges() -> list[float]:
    """The ``RMS_BINS + 1`` edges of the histogram's bins."""
    return [10 ** (LOWEST_DECADE + i / BINS_PER_DECADE) for i in range(RMS_BINS + 1)]


def token_rms(h: Tensor) -> Tensor:
    """Root mean square over the hidden size: h [N, D] in any dtype -> [N] float64."""
    return h.double().square().mean(-1).sqrt()


def angular_distance(a: Tensor, b: Tensor) -> Tensor:
    """arccos(cos(a, b)) / pi, the cosine clamped to [-1, 1]: two [N, D] -> [N] float64 from 0 to 1 (paper, Table 4).

    Equal vectors are at exactly 0. A vector of zeros is at 1/2 from all others.
    """
    a, b = a.double(), b.double()
    norms = (a.square().sum(-1) * b.square().sum(-1)).sqrt()  # one root of the product: exactly a.a if a is b
    cosine = ((a * b).sum(-1) / norms.clamp(min=torch.finfo(torch.float64).tiny)).clamp(-1.0, 1.0)
    return cosine.arccos() / math.pi


def kurtosis(values: Tensor) -> float | None:
    """Excess kurtosis m4 / m2^2 - 3 of [N] values, as SciPy's default (Fisher, biased): 0 for a normal distribution.

    The paper's Figure A1 does not say which one it shows; its "over 2400" would be the same in Pearson's, 3 larger. Of N
    values no more than N is possible: one outlier among equal ones. None where all values are the same.
    """
    values = values.double()
    mean = values.mean()
    deviations = values - mean
    variance = deviations.square().mean()
    if variance <= (1e-15 * mean) ** 2:
        return None
    return finite((deviations.pow(4).mean() / variance.square() - 3.0).item())


def histogram(values: Tensor) -> list[int]:
    """How many of [N] values lie in each bin of ``bin_edges``; those beyond count in the first or the last bin."""
    inner = torch.tensor(bin_edges()[1:-1], dtype=torch.float64)
    bins = torch.bucketize(values.double().cpu(), inner, right=True)
    return torch.bincount(bins, minlength=RMS_BINS).tolist()


def summarize(values: Tensor) -> dict[str, Any]:
    """Mean, standard deviation (over N, not N - 1), kurtosis, quantiles (linear between values) and histogram of [N]."""
    values = values.double().cpu()
    quantiles = torch.quantile(values, torch.tensor(QUANTILES, dtype=torch.float64))
    return {
        "mean": finite(values.mean().item()),
        "std": finite(values.std(correction=0).item()),
        "kurtosis": kurtosis(values),
        "quantiles": {f"{q:g}": finite(value) for q, value in zip(QUANTILES, quantiles.tolist(), strict=True)},
        "histogram": histogram(values),
    }


def finite(value: float) -> float | None:
    """The value, or None if it is NaN or infinite."""
    return value if math.isfinite(value) else None
