"""Parts of the plan kernel: what it reads, whom it gives slots, what it says and what it leaves behind."""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from wisp_core.pager.device import reference
from wisp_core.pager.device.blocks import store_blocks_by_id
from wisp_core.pager.device.state import READY, Header, Table

_NUM_RESIDENT = tl.constexpr(int(Header.NUM_RESIDENT))
_NUM_SEEN = tl.constexpr(int(Header.NUM_SEEN))
_READY = tl.constexpr(READY)
_POSITION = tl.constexpr(int(Table.POSITION))
_STACK = tl.constexpr(int(Table.STACK))
_SLOT = tl.constexpr(int(Table.SLOT))
_NO_SLOT = tl.constexpr(reference.NO_SLOT)
_PADDING_SLOT = tl.constexpr(reference.PADDING_SLOT)


@triton.jit
def load_ids(ids_ptr, start, num_ids, num_valid_ids, num_experts: tl.constexpr, ids_at_once: tl.constexpr):
    """Some routed ids as int32, and which of them are real: padding carries anything."""
    at = start + tl.arange(0, ids_at_once)
    ids = tl.load(ids_ptr + at, mask=at < num_ids, other=0)  # not masked by a loaded value: that would wait for it
    is_real = (at < num_valid_ids) & (ids >= 0) & (ids < num_experts)
    return tl.where(is_real, ids, 0).to(tl.int32), is_real


@triton.jit
def store_slot_ids(slot_ids_ptr, start, num_ids, ids, is_real, served, ids_at_once: tl.constexpr):
    """Say for some routed ids where each is served from; ``served`` is by expert [width]."""
    at = start + tl.arange(0, ids_at_once)
    slot_ids = tl.where(is_real, tl.gather(served, ids, 0), _PADDING_SLOT)
    tl.store(slot_ids_ptr + at, slot_ids, mask=at < num_ids)


@triton.jit
def admit(
    freed_ptr,
    cap,
    num_resident,
    needed,  # int32 [width] by expert, as position, slot and before
    position,
    slot,
    before,
    num_hits,
    num_misses,
):
    """Give slots to missing experts: free ones first, then those of the least recent experts not needed.

    Returns the new slots [width], the number of copies and the number of residents.
    """
    num_free = cap - num_resident
    num_copies = tl.minimum(num_misses, cap - num_hits)
    num_evicted = tl.maximum(num_copies - num_free, 0)
    miss = before - num_hits
    is_admitted = (needed != 0) & (position >= num_resident) & (miss < num_copies)
    admitted_slot = num_resident + miss
    if num_evicted > 0:
        # Residents lead the stack: how many lie behind an expert, and how many of those are needed, follow.
        eviction = (num_resident - 1 - position) - (num_hits - before)
        is_evicted = (needed == 0) & (position < num_resident) & (eviction < num_evicted)
        tl.store(freed_ptr + eviction, slot, mask=is_evicted)
        tl.debug_barrier()
        is_reusing = is_admitted & (miss >= num_free)
        freed = tl.load(freed_ptr + miss - num_free, mask=is_reusing, other=0)
        admitted_slot = tl.where(is_reusing, freed, admitted_slot)
        slot = tl.where(is_evicted, _NO_SLOT, slot)
    slot = tl.where(is_admitted, admitted_slot, slot)
    return slot, num_copies, num_resident + num_copies - num_evicted


@triton.jit
def add_ready(ready_ptr, num_chunks):
    """Say that this program's share of the first ``num_chunks`` chunks has come; they make READY when all have said so.

    The others that have a share add 1 each, and the first program adds what is then missing.
    """
    others = tl.maximum(tl.minimum(tl.num_programs(0), num_chunks) - 1, 0)
    program = tl.program_id(0)
    if program <= others:
        tl.debug_barrier()  # all of this program's stores, before the one that releases them
        tl.atomic_add(ready_ptr, tl.where(program == 0, _READY - others, 1), sem="release")


@triton.jit
def take_short_cut(
    slot_ids_ptr,
    ready_ptr,
    row_ids_ptr,
    w13_rows_ptr,
    w2_rows_ptr,
    num_padded_ptr,
    slot,  # int32 [width] by expert
    ids,  # int32 [ids_at_once], all there are
    is_real,
    num_ids,
    num_valid_ids,
    ids_at_once: tl.constexpr,
    rows_per_block: tl.constexpr,
):
    """Where nothing is missing, the slots are all that the products wait for: the rest runs beside them.

    Returns how many ids have no slot.
    """
    slot_of_id = tl.gather(slot, ids, 0)
    num_absent = tl.sum((is_real & (slot_of_id == _NO_SLOT)).to(tl.int32))
    if (num_absent == 0) & (tl.program_id(0) == 0):
        at = tl.arange(0, ids_at_once)
        slots = tl.where(is_real, slot_of_id, _PADDING_SLOT)
        tl.store(slot_ids_ptr + at, slots, mask=at < num_ids)
        if rows_per_block > 0:
            store_blocks_by_id(
                row_ids_ptr,
                w13_rows_ptr,
                w2_rows_ptr,
                num_padded_ptr,
                slots,
                num_ids,
                num_valid_ids,
                ids_at_once,
                rows_per_block,
            )
        add_ready(ready_ptr, 0)
    return num_absent


@triton.jit
def update_table(
    header_ptr,
    table_ptr,
    arrivals_ptr,
    is_last,
    needed,  # int32 [width] by expert, as before, position and new_slot
    before,
    position,
    new_slot,
    num_needed,
    new_num_resident,
    num_seen,
    width: tl.constexpr,
):
    """Move what was needed to the top of the stack; only the last program that has read the table may."""
    expert = tl.arange(0, width)
    num_first_uses = tl.sum(((needed != 0) & (position >= num_seen)).to(tl.int32))
    new_position = tl.where(needed != 0, before, num_needed + position - before)
    tl.store(table_ptr + _POSITION * width + expert, new_position, mask=is_last)
    tl.store(table_ptr + _STACK * width + new_position, expert, mask=is_last)
    tl.store(table_ptr + _SLOT * width + expert, new_slot, mask=is_last)
    tl.store(arrivals_ptr + expert, 0, mask=is_last)
    tl.store(header_ptr + _NUM_RESIDENT + expert * 0, new_num_resident, mask=is_last & (expert == 0))
    tl.store(header_ptr + _NUM_SEEN + expert * 0, num_seen + num_first_uses, mask=is_last & (expert == 0))
