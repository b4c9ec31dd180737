"""What a simulation ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def hardware() -> dict[str, object]:
    """The CPU; a simulation uses one core of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "device": "cpu",
    }


def versions() -> dict[str, str]:
    """Of what decides a figure."""
    packages = ("wisp", "numpy", "pydantic")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
