"""Sizes of both pools from the sizes of their parts: what an engine computes at start, and a plan before there is one.

Each parameter of a layer's experts starts on a page of its own, and its first C experts take whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def whole_pages(num_bytes: int, page_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages, bytes."""
    return -(-num_bytes // page_bytes) * page_bytes


def slots_bytes(parameter_bytes: Iterable[int], cap: int, page_bytes: int) -> int:
    """Bytes of one layer's slots at ``cap``; ``parameter_bytes`` are those of one expert, by parameter."""
    return sum(whole_pages(num_bytes * cap, page_bytes) for num_bytes in parameter_bytes)


def experts_bytes_by_cap(
    parameter_bytes: Sequence[int], *, num_layers: int, num_experts: int, page_bytes: int
) -> tuple[int, ...]:
    """Index C: bytes of all layers' slots at cap C; [num_experts + 1]. Layers are alike."""
    return tuple(num_layers * slots_bytes(parameter_bytes, cap, page_bytes) for cap in range(num_experts + 1))


def kv_groups_beside(experts_bytes: int, *, pooled_bytes: int, group_bytes: int) -> int:
    """KV groups, the null block's included, that the pooled budget holds beside the experts; 0 when none fits."""
    return max(0, pooled_bytes - experts_bytes) // group_bytes
