"""One record of the diagnostics: a line of ``diagnostics.jsonl``, and what TensorBoard shows of it.

    {"step", "phase", "placement", "blocks", "documents", "tokens", "predictions", "ce",
     "bins": {"low", "high", "count"}, log-spaced, of every histogram
     "boundaries": [{"mean", "std", "kurtosis", "quantiles", "histogram"} for each of the K + 1],
     "token_types": {type: {"tokens", "rms": [mean at each boundary]}},
     "removal": [{"block", "ce", "delta_ce", "angular_distance"} for each block],
     "logit_lens": [ce of each boundary],
     "gradient_norms": of the last training step, {"blocks": [...], "embedding", "boundary_norm", "head"}}

None (null) stands for what does not exist: a type without a token, a norm of frozen parameters, ``gradient_norms`` before
the first step of a phase.
"""

from typing import Any

import torch
from torch import nn

from blockgrow_titan.diagnostics.batch import FixedBatch, default_tokens, fixed_batch
from blockgrow_titan.diagnostics.probes import Probed, probe
from blockgrow_titan.diagnostics.statistics import HIGHEST_DECADE, LOWEST_DECADE, RMS_BINS, bin_edges, finite, summarize
from blockgrow_titan.diagnostics.token_types import TOKEN_TYPES
from blockgrow_titan.documents.batches import row_multiple
from blockgrow_titan.documents.source import DocumentSource
from blockgrow_titan.job_config import ConfigError, JobConfig


class Diagnostics:
    """The diagnostics of a training run; every rank makes one and all measure together.

    Args:
        job_config: The job's config: ``diagnostics``, ``validation``, ``documents`` and ``distill.chunk_tokens``.
        source: The validation documents.
        device: Where the student is.

    Raises:
        ConfigError: If no document has a token to predict.
    """

    def __init__(self, job_config: JobConfig, source: DocumentSource, device: torch.device) -> None:
        tokens = job_config.diagnostics.tokens
        if tokens == -1:
            tokens = default_tokens(job_config.validation.seq_len)
        try:
            self.batch = fixed_batch(
                source,
                tokens,
                rows=job_config.validation.local_batch_size,
                pad_to_multiple_of=row_multiple(job_config, job_config.validation.seq_len),
            )
        except ValueError as error:
            raise ConfigError(f"diagnostics.enable is true, but {error}; set it to false") from error
        self.chunk_tokens, self.device = job_config.distill.chunk_tokens, device

    def measure(self, model: nn.Module, gradient_norms: dict[str, Any] | None) -> dict[str, Any]:
        """The record of the model as it is, but for step and phase. Changes nothing in the model; all ranks must call."""
        probed = probe(model, self.batch, chunk_tokens=self.chunk_tokens, device=self.device)
        return record_of(probed, self.batch, model) | {"gradient_norms": gradient_norms}


def record_of(probed: Probed, batch: FixedBatch, model: nn.Module) -> dict[str, Any]:
    """What a walk has seen as plain numbers (see the module's docstring)."""
    args: Any = model.model_args
    lens, removed = probed.lens_ce.tolist(), probed.removed_ce.tolist()
    types = {}
    for index, name in enumerate(TOKEN_TYPES):
        of_type = probed.rms[:, probed.types == index]  # (K + 1, tokens of this type)
        types[name] = {"tokens": of_type.shape[1], "rms": [finite(mean) for mean in of_type.mean(1).tolist()]}
    return {
        "placement": args.placement,
        "blocks": len(removed),
        "documents": batch.documents,
        "tokens": batch.tokens,
        "predictions": batch.predictions,
        "ce": finite(lens[-1]),
        "bins": {"low": 10.0**LOWEST_DECADE, "high": 10.0**HIGHEST_DECADE, "count": RMS_BINS},
        "boundaries": [summarize(values) for values in probed.rms],
        "token_types": types,
        "removal": [
            {
                "block": k,
                "ce": finite(ce),
                "delta_ce": finite(ce - lens[-1]),
                "angular_distance": finite(probed.angles[k].mean().item()),
            }
            for k, ce in enumerate(removed)
        ],
        "logit_lens": [finite(ce) for ce in lens],
    }


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """A record's single numbers by TensorBoard tag; what is None is left out."""
    values: dict[str, float | None] = {"ce": record["ce"]}
    for k, boundary in enumerate(record["boundaries"]):
        values |= {f"rms_{name}/boundary_{k}": boundary[name] for name in ("mean", "std", "kurtosis")}
        values |= {f"rms_{name}/boundary_{k}": kind["rms"][k] for name, kind in record["token_types"].items()}
        values[f"logit_lens_ce/boundary_{k}"] = record["logit_lens"][k]
    for removal in record["removal"]:
        values |= {f"{name}/block_{removal['block']}": removal[name] for name in ("delta_ce", "angular_distance")}
    if norms := record["gradient_norms"]:
        values |= {f"grad_norm/block_{k}": norm for k, norm in enumerate(norms["blocks"])}
        values |= {f"grad_norm/{part}": norm for part, norm in norms.items() if part != "blocks"}
    return {f"diagnostics/{tag}": value for tag, value in values.items() if value is not None}


def histograms(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The residual RMS at each boundary, by tag, as the arguments of TensorBoard's ``add_histogram_raw``.

    Empty bins at both ends are left out. A boundary with a value that is not finite has none.
    """
    edges, tokens = bin_edges(), record["tokens"]
    result = {}
    for k, boundary in enumerate(record["boundaries"]):
        counts, mean, std = boundary["histogram"], boundary["mean"], boundary["std"]
        if mean is None or std is None:
            continue
        filled = [i for i, count in enumerate(counts) if count]
        first, last = filled[0], filled[-1] + 1
        result[f"diagnostics/rms/boundary_{k}"] = {
            "min": boundary["quantiles"]["0"],
            "max": boundary["quantiles"]["1"],
            "num": tokens,
            "sum": mean * tokens,
            "sum_squares": (std**2 + mean**2) * tokens,
            "bucket_limits": edges[first : last + 1],
            "bucket_counts": [0, *counts[first:last]],
        }
    return result
