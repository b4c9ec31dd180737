"""Puts vLLM's KV tensors into a `Region`, and reads where vLLM placed them.

vLLM gets its whole KV cache from one ``torch.zeros(n, dtype=torch.int8)`` inside an allocation context that a worker
may provide. Returning the region's tensor there means that no page is touched: a real ``torch.zeros`` writes each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from wisp_core.errors import UnsupportedModelError
from wisp_core.memory.balloon import KvGeometry, KvPlacement, group_blocks_of
from wisp_core.memory.region import Backing, Region

REGION_NAME = "kv"


class RegionForZeros(TorchFunctionMode):  # type: ignore[misc]
    """While active, the first ``torch.zeros(n, dtype=torch.int8)`` returns ``n`` bytes of a new region."""

    def __init__(self, backing: Backing) -> None:
        super().__init__()
        self._backing = backing
        self.region: Region | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stand in for ``torch.zeros``; everything else runs as it is."""
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8 or self.region is not None:
            return func(*args, **kwargs)
        (num_bytes,) = args
        self.region = self._backing.reserve(REGION_NAME, num_bytes)
        return self.region.tensor()[:num_bytes]


def kv_geometry(kv_cache_config: Any, page_bytes: int) -> KvGeometry:
    """Geometry of vLLM's ``KVCacheConfig``. Raises ConfigurationError when groups would share pages."""
    placements = [
        KvPlacement(
            offset=tensor.offset,
            layer_stride=tensor.layer_stride,
            block_stride=tensor.block_stride,
            num_layers=len(tensor.layers),
        )
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    if not placements:
        raise UnsupportedModelError("this model has no KV cache, so there is nothing to trade for experts")
    return KvGeometry.of(placements, num_blocks=kv_cache_config.num_blocks, page_bytes=page_bytes)


def block_group(kv_cache_specs: dict[str, Any], page_bytes: int) -> tuple[int, int]:
    """``(blocks per group, bytes per block)`` before vLLM has placed anything, from its per-layer specs.

    Raises UnsupportedModelError unless all layers are full attention alike: only then is one block one id in every
    layer, as the balloon needs.
    """
    sizes = {spec.page_size_bytes for spec in kv_cache_specs.values()}
    kinds = {type(spec).__name__ for spec in kv_cache_specs.values()}
    if len(sizes) != 1 or len(kinds) != 1:
        raise UnsupportedModelError(
            f"KV layers differ ({', '.join(sorted(kinds)) or 'none'}; block bytes {sorted(sizes)}): resizing the KV "
            "cache of hybrid models is not supported"
        )
    layer_bytes = sizes.pop()
    block_bytes = layer_bytes * len(kv_cache_specs)
    # A block is one stride in a block-outermost layout and one per layer otherwise; a group that fits both is safe.
    return group_blocks_of([layer_bytes, block_bytes], page_bytes), block_bytes
