"""Bytes of a model's weights that are not paged."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase


def dense_parameter_bytes(model: torch.nn.Module) -> int:
    """Sum over parameters and buffers outside expert layers, shared storages once.

    On CPU vLLM packs a linear layer's weight into its kernel's own format and leaves an empty tensor behind; such a
    layer counts with the size that it was created with.
    """
    sizes: dict[int, int] = {}
    packed_bytes = 0
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.numel():
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        if isinstance(module, LinearBase):
            packed_bytes += _packed_bytes(module)
    return sum(sizes.values()) + packed_bytes


def _packed_bytes(layer: Any) -> int:
    weight = getattr(layer, "weight", None)
    if weight is None or weight.numel():
        return 0
    # Whole sizes: paging refuses tensor parallelism.
    return int(layer.input_size * layer.output_size * weight.element_size())
