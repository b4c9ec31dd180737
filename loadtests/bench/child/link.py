"""How fast the host's memory reaches the device."""

from __future__ import annotations

import statistics
import time

import torch

_BYTES = 256 << 20
_REPEATS = 10


def measure_link_bytes_per_s() -> tuple[float, str]:
    """Median speed of copying 256 MiB, and how it was measured."""
    if torch.cuda.is_available():
        return _pinned_copy(), "page-locked cudaMemcpyAsync of 256 MiB"
    return _host_copy(), "copy of 256 MiB within host memory"


def _pinned_copy() -> float:
    source = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True).random_(0, 256)
    target = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    times_s = []
    for index in range(_REPEATS + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        if index >= 2:
            times_s.append(start.elapsed_time(stop) / 1e3)
    del target
    torch.cuda.empty_cache()
    return float(_BYTES / statistics.median(times_s))


def _host_copy() -> float:
    source = torch.zeros(_BYTES, dtype=torch.uint8)
    target = torch.ones(_BYTES, dtype=torch.uint8)
    times_s = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - started_s)
    return _BYTES / statistics.median(times_s)
