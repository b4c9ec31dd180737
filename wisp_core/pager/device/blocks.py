"""Blocks of a decode step's products, written by the plan: one for each expert that the step needs.

vLLM sorts rows by expert in two launches of their own, and takes one block for each (row, expert) when there are few.
The plan knows all of it already. An expert that several rows need is then read once, which counts most when it is read
from host memory.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from wisp_core.pager.device.block_rows import HostRows
from wisp_core.pager.device.reference import NO_SLOT

MAX_BLOCK_IDS = 128
"""Routed ids of a step for which the plan writes blocks: it compares each with each."""

_ALIGNMENT = 4  # int32 values in 16 bytes
_NO_SLOT = tl.constexpr(NO_SLOT)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which rows each block computes and which expert it reads, as vLLM's kernel takes it. Padding rows are in none.

    There are as many blocks as needed experts, in the order of the recency stack. A row's ids must differ.
    """

    row_ids: torch.Tensor  # int32 [num_ids * rows_per_block]: indices of routed ids, num_ids where there is none
    w13_rows: torch.Tensor  # int32 [num_ids]: by block, rows counted from slot 0
    w2_rows: torch.Tensor  # int32 [num_ids]
    num_padded: torch.Tensor  # int32 [1]: rows_per_block times the blocks in use
    rows_per_block: int
    host: HostRows | None  # None: every needed expert gets a slot

    @classmethod
    def empty(cls, topk_ids: torch.Tensor, rows_per_block: int, host: HostRows | None) -> Blocks:
        """Room for the blocks of ``topk_ids`` [rows, top_k]; at most ``rows_per_block`` rows, MAX_BLOCK_IDS ids."""
        num_ids = topk_ids.numel()
        assert len(topk_ids) <= rows_per_block
        assert num_ids <= MAX_BLOCK_IDS
        length = -(-num_ids // _ALIGNMENT) * _ALIGNMENT
        parts = (length * rows_per_block, length, length, 1)
        memory = torch.empty(sum(parts), dtype=torch.int32, device=topk_ids.device)
        row_ids, w13_rows, w2_rows, num_padded = memory.split(parts)
        return cls(
            row_ids[: num_ids * rows_per_block], w13_rows[:num_ids], w2_rows[:num_ids], num_padded, rows_per_block, host
        )


def block_arguments(blocks: Blocks | None, *, unused: torch.Tensor) -> dict[str, Any]:
    """What a plan kernel is told of the blocks that it writes; ``unused`` stands for missing ones."""
    host = blocks.host if blocks is not None else None
    return {
        "row_ids_ptr": blocks.row_ids if blocks is not None else unused,
        "w13_rows_ptr": blocks.w13_rows if blocks is not None else unused,
        "w2_rows_ptr": blocks.w2_rows if blocks is not None else unused,
        "num_padded_ptr": blocks.num_padded if blocks is not None else unused,
        "first_w13": host.first_w13 if host is not None else 0,
        "first_w2": host.first_w2 if host is not None else 0,
        "rows_per_block": blocks.rows_per_block if blocks is not None else 0,
    }


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What a plan on the path DECODE gives to a layer's two products, which must follow it."""

    slot_ids: torch.Tensor  # int32 [rows, top_k]
    blocks: Blocks | None  # None: each routed id is a block, and all have slots
    ready: torch.Tensor  # `LayerState.ready`, where the plan leaves a mark that the second product takes back
    is_whole: (
        bool  # the plan's kernel copies everything itself, so that its mark tells when the first product may start
    )


@triton.jit
def store_blocks(
    row_ids_ptr,
    w13_rows_ptr,
    w2_rows_ptr,
    num_padded_ptr,
    first_w13,
    first_w2,
    ids,  # int32 [ids_at_once]
    is_real,
    num_ids,
    needed,  # int32 [width] by expert, as before and slot
    before,
    slot,
    num_needed,
    width: tl.constexpr,
    ids_at_once: tl.constexpr,
    rows_per_block: tl.constexpr,
):
    """Write the blocks of a step whose ids are all at hand. ``before`` is an expert's place among the needed ones."""
    expert = tl.arange(0, width)
    is_elsewhere = slot == _NO_SLOT
    tl.store(w13_rows_ptr + before, tl.where(is_elsewhere, first_w13 + expert, slot), mask=needed != 0)
    tl.store(w2_rows_ptr + before, tl.where(is_elsewhere, first_w2 + expert, slot), mask=needed != 0)
    tl.store(num_padded_ptr, num_needed * rows_per_block)
    at = tl.arange(0, ids_at_once * rows_per_block)
    tl.store(row_ids_ptr + at, num_ids, mask=at < num_ids * rows_per_block)
    # An id's place in its block: how many before it ask for the same expert.
    index = tl.arange(0, ids_at_once)
    marked = tl.where(is_real, ids, -1)
    is_same_before = (marked[:, None] == marked[None, :]) & (index[:, None] > index[None, :])
    place = tl.sum(is_same_before.to(tl.int32), 1)
    block = tl.gather(before, ids, 0)
    tl.debug_barrier()  # the padding that these take the place of
    tl.store(row_ids_ptr + block * rows_per_block + place, index, mask=is_real & (place < rows_per_block))


@triton.jit
def store_blocks_by_id(
    row_ids_ptr,
    w13_rows_ptr,
    w2_rows_ptr,
    num_padded_ptr,
    slots,  # int32 [ids_at_once] by routed id
    num_ids,
    num_valid_ids,
    ids_at_once: tl.constexpr,
    rows_per_block: tl.constexpr,
):
    """Write a block for each routed id of a step that misses nothing, as vLLM does for few rows.

    That needs no count of who needs what, only the slots.
    """
    index = tl.arange(0, ids_at_once)
    tl.store(w13_rows_ptr + index, slots, mask=index < num_ids)
    tl.store(w2_rows_ptr + index, slots, mask=index < num_ids)
    tl.store(num_padded_ptr, num_valid_ids * rows_per_block)
    at = tl.arange(0, ids_at_once * rows_per_block)
    is_first = at % rows_per_block == 0
    tl.store(row_ids_ptr + at, tl.where(is_first, at // rows_per_block, num_ids), mask=at < num_ids * rows_per_block)
