"""What an engine was measured on and with: the machine and, where there is one, its GPU."""

from __future__ import annotations

import torch

from loadtests import machine


def facts() -> dict[str, dict[str, object]]:
    """``hardware`` and ``versions`` of a results file."""
    hardware, versions = machine.hardware(), dict[str, object](machine.versions())
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        hardware |= {"device": properties.name, "gpu_memory_bytes": properties.total_memory}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return {"hardware": hardware, "versions": versions}
