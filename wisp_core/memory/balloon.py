"""Which KV blocks can leave the pool, and which bytes they are: the geometry of the KV balloon.

vLLM places block ``b`` of layer ``l`` at ``offset + l * layer_stride + b * block_stride`` in one allocation. Memory
moves in whole pages, so blocks move in *groups*: ``group_blocks`` consecutive blocks fill whole pages in every
layer. Group 0 holds vLLM's null block and never moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wisp_core.errors import ConfigurationError
from wisp_core.memory.region import ByteRange

NULL_GROUP = 0
"""The group that holds vLLM's null block, which padded rows may read and write at any time."""


@dataclass(frozen=True, kw_only=True)
class KvPlacement:
    """Where a set of same-shaped layers lies in the allocation; all sizes in bytes."""

    offset: int
    layer_stride: int
    block_stride: int
    num_layers: int

    def runs(self) -> set[tuple[int, int]]:
        """``(start, block_stride)`` of each run of blocks.

        A layer-outermost layout has a run per layer. A block-outermost one (``layer_stride < block_stride``) packs
        all layers of a block into one stride, so that there is a single run from the allocation's start.
        """
        if self.layer_stride < self.block_stride:
            return {(0, self.block_stride)}
        return {(self.offset + layer * self.layer_stride, self.block_stride) for layer in range(self.num_layers)}


def group_blocks_of(block_strides: Iterable[int], page_bytes: int) -> int:
    """Least number of consecutive blocks that fill whole pages at every stride."""
    return math.lcm(*(page_bytes // math.gcd(stride, page_bytes) for stride in block_strides))


@dataclass(frozen=True, kw_only=True)
class KvGeometry:
    """Groups of blocks and their bytes."""

    page_bytes: int
    num_blocks: int
    group_blocks: int
    block_bytes: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, placements: Iterable[KvPlacement], *, num_blocks: int, page_bytes: int) -> KvGeometry:
        """Derive groups from vLLM's placements.

        Raises:
            ConfigurationError: A run starts inside a page or the last group is not full, so that pages would be
                shared between groups.
        """
        runs = sorted(set().union(*(placement.runs() for placement in placements)))
        group_blocks = group_blocks_of((stride for _, stride in runs), page_bytes)
        if num_blocks % group_blocks != 0 or any(start % page_bytes for start, _ in runs):
            raise ConfigurationError(
                f"the KV cache of {num_blocks} blocks does not divide into groups of {group_blocks} blocks on pages of "
                f"{page_bytes} bytes; use another block_size"
            )
        ends = [start + stride * num_blocks for start, stride in runs]
        if any(end > start for end, (start, _) in zip(ends, runs[1:], strict=False)):
            raise ConfigurationError("KV tensors of different block sizes overlap: this hybrid model is not supported")
        block_bytes = sum(stride for _, stride in runs)
        return cls(
            page_bytes=page_bytes,
            num_blocks=num_blocks,
            group_blocks=group_blocks,
            block_bytes=block_bytes,
            runs=tuple(runs),
        )

    @property
    def num_groups(self) -> int:
        """Groups in the address range, the null group included."""
        return self.num_blocks // self.group_blocks

    @property
    def group_bytes(self) -> int:
        """Bytes of one group over all layers, whole pages."""
        return self.group_blocks * self.block_bytes

    def ranges(self, groups: Iterable[int]) -> list[ByteRange]:
        """Page-aligned byte ranges of ``groups``, neighbours joined, ascending."""
        spans = join_neighbours(groups)
        return [
            (start + first * self.group_blocks * stride, start + stop * self.group_blocks * stride)
            for start, stride in self.runs
            for first, stop in spans
        ]


def join_neighbours(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Half-open spans of consecutive numbers, ascending."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans


def free_groups(block_ids: Sequence[int], are_cached: Sequence[bool], group_blocks: int) -> list[int]:
    """Wholly free groups in the order in which they should go, the null group never among them.

    A group whose blocks are all uncached goes first. The others follow by their most valuable block: the cached one
    that vLLM would evict last.

    Args:
        block_ids: The free blocks in vLLM's eviction order, first to be evicted first.
        are_cached: For each of them, whether it holds a reusable prefix.
        group_blocks: Blocks per group.
    """
    groups = np.asarray(block_ids, dtype=np.int64) // group_blocks
    is_whole = np.bincount(groups, minlength=NULL_GROUP + 1) == group_blocks
    is_whole[NULL_GROUP] = False
    value = np.full(len(is_whole), -1, dtype=np.int64)
    cached_at = np.flatnonzero(np.asarray(are_cached, dtype=bool))
    value[groups[cached_at]] = cached_at  # ascending, so that a group keeps its last
    whole = np.flatnonzero(is_whole)
    return [int(group) for group in whole[np.lexsort((-whole, value[whole]))]]
