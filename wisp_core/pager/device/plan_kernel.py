"""Plan kernels: decide what one layer needs and fetch it, without the host.

Both kernels equal `wisp_core.pager.device.reference` exactly. They hold a layer's table in registers, so that a step
costs a few round trips to memory; everything follows from one prefix sum over the recency stack: the number of needed
experts that are more recent than a given one. The cap is read from memory and the code is compiled for the number of
experts, so one captured graph serves every cap.

The programs that copy would have to wait for one that plans, and a launch costs a third of a plan. So each of them
plans for itself, and copies its share. What they store for themselves and for later kernels (the lists) they all store
alike; the table changes only when the last of them has read it.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wisp_core.pager.device import reference
from wisp_core.pager.device.gather_kernel import Gather, copy_listed
from wisp_core.pager.device.launch import chained
from wisp_core.pager.device.state import (
    COUNTS_WIDTH,
    HEADER_WIDTH,
    MAX_ROUTED,
    ROUTED_MISS,
    DeviceState,
    Header,
    LayerState,
    Lists,
    Path,
    Table,
)

_MIN_IDS_AT_ONCE, _MAX_IDS_AT_ONCE = 32, MAX_ROUTED
_NOTHING_TO_GATHER = {"num_parameters": 1, "unit": tl.int32, "chunk_units": 16, "vector_units": 1, "vector_bytes": 4}

_CAP = tl.constexpr(int(Header.CAP))
_NUM_RESIDENT = tl.constexpr(int(Header.NUM_RESIDENT))
_NUM_SEEN = tl.constexpr(int(Header.NUM_SEEN))
_NUM_MISSES = tl.constexpr(int(Header.NUM_MISSES))
_NUM_COPIES = tl.constexpr(int(Header.NUM_COPIES))
_NUM_NEEDED = tl.constexpr(int(Header.NUM_NEEDED))
_ROUTED_MISS = tl.constexpr(ROUTED_MISS)
_HEADER_WIDTH = tl.constexpr(HEADER_WIDTH)
_POSITION = tl.constexpr(int(Table.POSITION))
_STACK = tl.constexpr(int(Table.STACK))
_SLOT = tl.constexpr(int(Table.SLOT))
_TABLE_HEIGHT = tl.constexpr(len(Table))
_SOURCE = tl.constexpr(int(Lists.SOURCE))
_TARGET = tl.constexpr(int(Lists.TARGET))
_FREED = tl.constexpr(int(Lists.FREED))
_LISTS_HEIGHT = tl.constexpr(len(Lists))
_COUNTS_WIDTH = tl.constexpr(COUNTS_WIDTH)
_NO_SLOT = tl.constexpr(reference.NO_SLOT)
_PADDING_SLOT = tl.constexpr(reference.PADDING_SLOT)


@triton.jit
def _load_ids(ids_ptr, start, num_ids, num_valid_ids, num_experts: tl.constexpr, ids_at_once: tl.constexpr):
    """Some routed ids as int32, and which of them are real: padding carries anything."""
    at = start + tl.arange(0, ids_at_once)
    ids = tl.load(ids_ptr + at, mask=at < num_ids, other=0)  # not masked by a loaded value: that would wait for it
    is_real = (at < num_valid_ids) & (ids >= 0) & (ids < num_experts)
    return tl.where(is_real, ids, 0).to(tl.int32), is_real


@triton.jit
def _store_slot_ids(slot_ids_ptr, start, num_ids, ids, is_real, served, ids_at_once: tl.constexpr):
    at = start + tl.arange(0, ids_at_once)
    slot_ids = tl.where(is_real, tl.gather(served, ids, 0), _PADDING_SLOT)
    tl.store(slot_ids_ptr + at, slot_ids, mask=at < num_ids)


@triton.jit
def _keep_routed(routed_ptr, num_ids, ids, is_real, is_missing, ids_at_once: tl.constexpr):
    """Keep the first ids for `wisp_core.pager.device.uses`."""
    at = tl.arange(0, ids_at_once)
    kept = ids + tl.gather(is_missing.to(tl.int32), ids, 0) * _ROUTED_MISS
    tl.store(routed_ptr + at, tl.where(is_real, kept, -1).to(tl.int16), mask=at < num_ids)


@triton.jit
def _add_counts(counts_ptr, num_rows, num_needed, num_hits, num_misses, num_copies):
    """Add one step to the sums, in the order of `StepCounts`. Atomic only because that does not wait for a load."""
    at = tl.arange(0, _COUNTS_WIDTH)
    step = (at == 0).to(tl.int64)
    step += tl.where(at == 1, num_rows, 0)
    step += tl.where(at == 2, num_needed, 0)
    step += tl.where(at == 3, num_hits, 0)
    step += tl.where(at == 4, num_misses, 0)
    step += tl.where(at == 5, num_misses - num_copies, 0)
    tl.atomic_add(counts_ptr + at, step, sem="relaxed")


@triton.jit
def _add_distances(distances_ptr, needed, position, num_seen, num_experts: tl.constexpr):
    """Count each use at its expert's place in the stack, first uses at the end."""
    place = tl.where(position >= num_seen, num_experts, position)
    tl.atomic_add(distances_ptr + place, needed.to(tl.int64), mask=needed != 0, sem="relaxed")


@triton.jit
def _admit(
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


@triton.jit(
    do_not_specialize=["num_ids", "top_k", "chunks_per_expert"],
    do_not_specialize_on_alignment=["ids_ptr", "slot_ids_ptr"],
)
def _plan_kernel(
    ids_ptr,
    slot_ids_ptr,
    num_ids,
    top_k,
    num_valid_rows_ptr,
    header_ptr,
    table_ptr,
    lists_ptr,
    arrivals_ptr,
    distances_ptr,
    counts_ptr,
    routed_ptr,
    parameters_ptr,
    chunks_per_expert,
    num_experts: tl.constexpr,
    width: tl.constexpr,
    ids_at_once: tl.constexpr,
    is_admitting: tl.constexpr,
    is_gathering: tl.constexpr,
    is_chained: tl.constexpr,
    num_parameters: tl.constexpr,
    unit: tl.constexpr,
    chunk_units: tl.constexpr,
    vector_units: tl.constexpr,
    vector_bytes: tl.constexpr,
):
    if is_chained:
        tl.extra.cuda.gdc_launch_dependents()  # what follows may be set up meanwhile; it waits for this kernel's end
        tl.extra.cuda.gdc_wait()
    # Every load that depends on nothing comes first, so that one latency covers them all.
    expert = tl.arange(0, width)
    num_valid_rows = tl.minimum(tl.load(num_valid_rows_ptr), num_ids // top_k)
    num_valid_ids = num_valid_rows * top_k
    cap = tl.load(header_ptr + _CAP)
    num_resident = tl.load(header_ptr + _NUM_RESIDENT)
    num_seen = tl.load(header_ptr + _NUM_SEEN)
    position = tl.load(table_ptr + _POSITION * width + expert)
    stack = tl.load(table_ptr + _STACK * width + expert)
    slot = tl.load(table_ptr + _SLOT * width + expert)
    ids, is_real = _load_ids(ids_ptr, 0, num_ids, num_valid_ids, num_experts, ids_at_once)

    uses = tl.histogram(ids, width, mask=is_real)
    for start in range(ids_at_once, num_ids, ids_at_once):
        more_ids, more_real = _load_ids(ids_ptr, start, num_ids, num_valid_ids, num_experts, ids_at_once)
        uses += tl.histogram(more_ids, width, mask=more_real)
    needed = (uses > 0).to(tl.int32)
    needed_at = tl.gather(needed, stack, 0)
    before = tl.gather(tl.cumsum(needed_at, 0) - needed_at, position, 0)
    is_missing = (needed != 0) & (slot == _NO_SLOT)
    # One sum for three facts. The third is never true, but it makes the sum wait for everything that was loaded.
    is_unread = (before < 0) | (num_resident < 0) | (num_seen < 0)
    sums = tl.sum(needed + (is_missing.to(tl.int32) << 10) + (is_unread.to(tl.int32) << 20))
    num_needed = sums & 1023
    num_misses = (sums >> 10) & 1023
    num_hits = num_needed - num_misses

    num_copies = 0
    if is_admitting:
        # Relaxed: the sum carries the order from this program's loads, and the stores below depend on the answer.
        num_arrived = tl.atomic_add(arrivals_ptr + expert, 1 + (sums >> 20), sem="relaxed")
        new_slot, num_copies, new_num_resident = _admit(
            lists_ptr + _FREED * width, cap, num_resident, needed, position, slot, before, num_hits, num_misses
        )
    else:
        new_slot = slot
    tl.store(lists_ptr + _SOURCE * width + before - num_hits, expert, mask=is_missing)
    tl.store(lists_ptr + _TARGET * width + before - num_hits, new_slot, mask=is_missing)

    if tl.program_id(0) == 0:
        served = tl.where(new_slot == _NO_SLOT, num_experts + expert, new_slot)
        _store_slot_ids(slot_ids_ptr, 0, num_ids, ids, is_real, served, ids_at_once)
        _keep_routed(routed_ptr, num_ids, ids, is_real, is_missing, ids_at_once)
        for start in range(ids_at_once, num_ids, ids_at_once):
            more_ids, more_real = _load_ids(ids_ptr, start, num_ids, num_valid_ids, num_experts, ids_at_once)
            _store_slot_ids(slot_ids_ptr, start, num_ids, more_ids, more_real, served, ids_at_once)
        tl.store(header_ptr + _NUM_MISSES, num_misses)
        tl.store(header_ptr + _NUM_COPIES, num_copies)
        _add_counts(counts_ptr, num_valid_rows, num_needed, num_hits, num_misses, num_copies)
        if is_admitting:
            tl.store(header_ptr + _NUM_NEEDED, num_needed)
            _add_distances(distances_ptr, needed, position, num_seen, num_experts)

    if is_gathering:
        tl.debug_barrier()  # the lists
        copy_listed(
            parameters_ptr,
            lists_ptr,
            num_copies,
            chunks_per_expert,
            num_parameters,
            width,
            unit,
            chunk_units,
            vector_units,
            vector_bytes,
        )

    if is_admitting:
        is_last = num_arrived == tl.num_programs(0) - 1
        num_first_uses = tl.sum(((needed != 0) & (position >= num_seen)).to(tl.int32))
        new_position = tl.where(needed != 0, before, num_needed + position - before)
        tl.store(table_ptr + _POSITION * width + expert, new_position, mask=is_last)
        tl.store(table_ptr + _STACK * width + new_position, expert, mask=is_last)
        tl.store(table_ptr + _SLOT * width + expert, new_slot, mask=is_last)
        tl.store(arrivals_ptr + expert, 0, mask=is_last)
        tl.store(header_ptr + _NUM_RESIDENT + expert * 0, new_num_resident, mask=is_last & (expert == 0))
        tl.store(header_ptr + _NUM_SEEN + expert * 0, num_seen + num_first_uses, mask=is_last & (expert == 0))


@triton.jit
def _set_cap_kernel(new_cap_ptr, header_ptr, table_ptr, lists_ptr, width: tl.constexpr):
    """One program per layer: keep the most recent experts, in slots below the new cap."""
    layer = tl.program_id(0)
    header_ptr += layer * _HEADER_WIDTH
    table_ptr += layer * _TABLE_HEIGHT * width
    lists_ptr += layer * _LISTS_HEIGHT * width
    expert = tl.arange(0, width)
    cap = tl.load(new_cap_ptr)
    num_kept = tl.minimum(tl.load(header_ptr + _NUM_RESIDENT), cap)
    position = tl.load(table_ptr + _POSITION * width + expert)
    slot = tl.load(table_ptr + _SLOT * width + expert)

    is_dropped = (slot != _NO_SLOT) & (position >= num_kept)
    is_freed = is_dropped & (slot < cap)
    freed_ptr = lists_ptr + _FREED * width
    tl.store(freed_ptr + tl.cumsum(is_freed.to(tl.int32), 0) - 1, slot, mask=is_freed)
    tl.debug_barrier()
    is_moved = (slot >= cap) & (position < num_kept)
    num_moves = tl.sum(is_moved.to(tl.int32))
    move = tl.cumsum(is_moved.to(tl.int32), 0) - 1
    target = tl.load(freed_ptr + move, mask=is_moved, other=0)
    tl.store(lists_ptr + _SOURCE * width + move, slot, mask=is_moved)
    tl.store(lists_ptr + _TARGET * width + move, target, mask=is_moved)
    slot = tl.where(is_dropped, _NO_SLOT, tl.where(is_moved, target, slot))
    tl.store(table_ptr + _SLOT * width + expert, slot)
    tl.store(header_ptr + _CAP, cap)
    tl.store(header_ptr + _NUM_RESIDENT, num_kept)
    tl.store(header_ptr + _NUM_MISSES, num_moves)
    tl.store(header_ptr + _NUM_COPIES, num_moves)


def plan_step(
    layer: LayerState,
    topk_ids: torch.Tensor,
    slot_ids: torch.Tensor,
    num_valid_rows: torch.Tensor,
    *,
    path: Path = Path.DECODE,
    gather: Gather | None = None,
    num_warps: int = 4,
) -> None:
    """Plan one step of one layer on the current stream, and fetch what it misses; a graph may capture it.

    Args:
        layer: read and updated; its lists then name the misses.
        topk_ids: integer [rows, top_k], contiguous, at least one row; anything may stand in padding.
        slot_ids: integer [rows, top_k], contiguous, receives the slot of each id; `reference` says which values.
        num_valid_rows: int32 [1] on the device, rows that are real tokens; more than there are means all.
        path: DECODE is `LayerTable.plan`, STREAMED is `LayerTable.look_up`.
        gather: copies the experts that got a slot; None: that comes later, or never, as on the path STREAMED.
        num_warps: few, since their exchanges and not their arithmetic take the time.
    """
    assert topk_ids.is_contiguous()
    assert slot_ids.is_contiguous()
    assert slot_ids.shape == topk_ids.shape
    assert gather is None or path is Path.DECODE
    num_ids = topk_ids.numel()
    leading = gather.leading if gather is not None else None
    _plan_kernel[(gather.num_programs if gather is not None and leading is not None else 1,)](
        topk_ids,
        slot_ids,
        num_ids,
        topk_ids.shape[1],
        num_valid_rows,
        layer.header,
        layer.table,
        layer.lists,
        layer.arrivals,
        layer.distances,
        layer.counts[path],
        layer.routed,
        leading.table if leading is not None else layer.counts,  # else not looked at
        leading.chunks_per_expert if leading is not None else 0,
        num_experts=layer.num_experts,
        width=layer.table.shape[1],
        ids_at_once=min(max(triton.next_power_of_2(num_ids), _MIN_IDS_AT_ONCE), _MAX_IDS_AT_ONCE),
        is_admitting=path is Path.DECODE,
        is_gathering=leading is not None,
        num_warps=num_warps,
        **(leading.constants if leading is not None else _NOTHING_TO_GATHER),
        **chained(layer.header),
    )
    if gather is not None:
        gather.run(layer, is_leading_done=True)


def set_cap(state: DeviceState, cap: int) -> None:
    """Change the cap of every layer, between steps, on the current stream.

    The layers' lists then name slots to move: carry them out, slot tensors onto themselves, before pages go and
    before the next step is planned.
    """
    if not 0 < cap <= state.num_experts:
        raise ValueError(f"cap must be in 1..{state.num_experts} (the number of experts), got {cap}")
    state.new_cap.fill_(cap)
    _set_cap_kernel[(state.num_layers,)](
        state.new_cap, state.header, state.table, state.lists, width=state.width, num_warps=1
    )
