"""How kernels are launched one after the other."""

from __future__ import annotations

import torch


def chained(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options by which a kernel is set up while the one before it ends, where the device can do that."""
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0):
        return {"is_chained": True, "launch_pdl": True}
    return {"is_chained": False}
