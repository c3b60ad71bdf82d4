"""What torchtitan 0.2.2 needs to run without an accelerator, all in one place.

Import this module before anything of torchtitan. With an accelerator it changes nothing. Without one:

- torchtitan falls back to device "cuda" when torch names no accelerator; it is told "cpu".
- ``torch.cpu`` has no memory statistics; the metrics read the process's resident memory instead.
- there is no table of peak FLOPS for CPUs; the peak is NaN, and the console leaves the MFU out.

FSDP2's one CPU override, plain sums in gloo's reduce-scatter, needs the model and stands in ``parallelize.py``.
"""

import math

import torch
import torch._utils

HAS_ACCELERATOR = torch._utils._get_available_device_type() is not None

if not HAS_ACCELERATOR:
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan reads it once, at import

from blockgrow_titan.infra.imports import titan_on_demand  # noqa: E402

with titan_on_demand():  # those that load what may never be needed
    import torchtitan.components.metrics as titan_metrics
    import torchtitan.components.validate
    import torchtitan.models.attention
    import torchtitan.models.qwen3  # noqa: F401
    import torchtitan.tools.utils as titan_utils


class ProcessMemoryMonitor:
    """Resident memory of this process, in the shape of torchtitan's ``DeviceMemoryMonitor``."""

    def __init__(self) -> None:
        import psutil

        self.process = psutil.Process()
        self.capacity = psutil.virtual_memory().total
        self.device_name = "CPU"
        self.device_capacity_gib = self.capacity / 2**30

    def get_peak_stats(self) -> titan_metrics.DeviceMemStats:
        """Resident bytes now, as GiB and as a share of the machine's memory."""
        resident = self.process.memory_info().rss
        gib, percent = resident / 2**30, 100 * resident / self.capacity
        return titan_metrics.DeviceMemStats(gib, percent, gib, percent, 0, 0)

    def reset_peak_stats(self) -> None:
        """Resident memory has no peak counter to reset."""


if not HAS_ACCELERATOR:
    titan_metrics.build_device_memory_monitor = ProcessMemoryMonitor
    titan_utils.get_peak_flops = lambda device_name: math.nan
