"""Plan kernel: decides what one layer needs and fetches it, without the host.

It equals `wisp_core.pager.device.reference` exactly. It holds a layer's table in registers, so that a step costs a few
round trips to memory; everything follows from one prefix sum over the recency stack: the number of needed experts that
are more recent than a given one. The cap is read from memory and the code is compiled for the number of experts, so one
captured graph serves every cap.

The programs that copy would have to wait for one that plans, and a launch costs a third of a plan. So each of them
plans for itself, and copies its share. What they store for themselves and for later kernels (the lists) they all store
alike; the table changes only when the last of them has read it.

What the first product reads is copied first. Then `LayerState.ready` says so, and that product, launched beside this
kernel (`wisp_core.pager.device.products`), runs while the rest is copied.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wisp_core.pager.device import reference
from wisp_core.pager.device.blocks import Blocks, block_arguments, store_blocks
from wisp_core.pager.device.gather_kernel import Gather, copy_listed, leading_arguments
from wisp_core.pager.device.launch import chained
from wisp_core.pager.device.plan_counts import add_counts, add_distances, keep_routed
from wisp_core.pager.device.plan_parts import (
    add_ready,
    admit,
    load_ids,
    store_slot_ids,
    take_short_cut,
    update_table,
)
from wisp_core.pager.device.state import (
    MAX_ROUTED,
    FetchPath,
    Header,
    LayerState,
    Lists,
    Table,
)

_PLANNING_WARPS = 4  # few: their exchanges and not their arithmetic take the time
_COPYING_WARPS = 8
_FEW_IDS = 4  # vLLM's rule too: with so many times as many experts, ids get blocks of their own
_MIN_IDS_AT_ONCE, _MAX_IDS_AT_ONCE = 32, MAX_ROUTED

_CAP = tl.constexpr(int(Header.CAP))
_NUM_RESIDENT = tl.constexpr(int(Header.NUM_RESIDENT))
_NUM_SEEN = tl.constexpr(int(Header.NUM_SEEN))
_NUM_MISSES = tl.constexpr(int(Header.NUM_MISSES))
_NUM_COPIES = tl.constexpr(int(Header.NUM_COPIES))
_NUM_NEEDED = tl.constexpr(int(Header.NUM_NEEDED))
_POSITION = tl.constexpr(int(Table.POSITION))
_STACK = tl.constexpr(int(Table.STACK))
_SLOT = tl.constexpr(int(Table.SLOT))
_SOURCE = tl.constexpr(int(Lists.SOURCE))
_TARGET = tl.constexpr(int(Lists.TARGET))
_FREED = tl.constexpr(int(Lists.FREED))
_NO_SLOT = tl.constexpr(reference.NO_SLOT)


@triton.jit(
    do_not_specialize=["num_ids", "top_k", "first_chunks", "second_chunks", "first_w13", "first_w2"],
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
    ready_ptr,
    distances_ptr,
    counts_ptr,
    routed_ptr,
    first_ptr,  # parameters to copy before READY, as `copy_listed` takes them
    first_chunks,
    second_ptr,  # parameters to copy after it
    second_chunks,
    row_ids_ptr,
    w13_rows_ptr,
    w2_rows_ptr,
    num_padded_ptr,
    first_w13,
    first_w2,
    num_experts: tl.constexpr,
    width: tl.constexpr,
    ids_at_once: tl.constexpr,
    is_admitting: tl.constexpr,
    is_marking: tl.constexpr,
    is_chained: tl.constexpr,
    rows_per_block: tl.constexpr,  # 0: no blocks
    has_short_cut: tl.constexpr,
    num_first: tl.constexpr,  # parameters; 0: none
    num_second: tl.constexpr,
    unit: tl.constexpr,
    chunk_units: tl.constexpr,
    vector_units: tl.constexpr,
    vector_bytes: tl.constexpr,
):
    if is_chained:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # what follows sets itself up meanwhile, and waits for READY or our end
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
    ids, is_real = load_ids(ids_ptr, 0, num_ids, num_valid_ids, num_experts, ids_at_once)

    num_absent = 1
    if has_short_cut:
        num_absent = take_short_cut(
            slot_ids_ptr,
            ready_ptr,
            row_ids_ptr,
            w13_rows_ptr,
            w2_rows_ptr,
            num_padded_ptr,
            slot,
            ids,
            is_real,
            num_ids,
            num_valid_ids,
            ids_at_once,
            rows_per_block,
        )

    uses = tl.histogram(ids, width, mask=is_real)
    for start in range(ids_at_once, num_ids, ids_at_once):
        more_ids, more_real = load_ids(ids_ptr, start, num_ids, num_valid_ids, num_experts, ids_at_once)
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
        new_slot, num_copies, new_num_resident = admit(
            lists_ptr + _FREED * width, cap, num_resident, needed, position, slot, before, num_hits, num_misses
        )
    else:
        new_slot = slot
    tl.store(lists_ptr + _SOURCE * width + before - num_hits, expert, mask=is_missing)
    tl.store(lists_ptr + _TARGET * width + before - num_hits, new_slot, mask=is_missing)

    if (num_absent > 0) & (tl.program_id(0) == 0):
        served = tl.where(new_slot == _NO_SLOT, num_experts + expert, new_slot)
        store_slot_ids(slot_ids_ptr, 0, num_ids, ids, is_real, served, ids_at_once)
        for start in range(ids_at_once, num_ids, ids_at_once):
            more_ids, more_real = load_ids(ids_ptr, start, num_ids, num_valid_ids, num_experts, ids_at_once)
            store_slot_ids(slot_ids_ptr, start, num_ids, more_ids, more_real, served, ids_at_once)
        if rows_per_block > 0:
            store_blocks(
                row_ids_ptr,
                w13_rows_ptr,
                w2_rows_ptr,
                num_padded_ptr,
                first_w13,
                first_w2,
                ids,
                is_real,
                num_ids,
                needed,
                before,
                new_slot,
                num_needed,
                width,
                ids_at_once,
                rows_per_block,
            )

    if is_admitting:
        if num_first + num_second > 0:
            tl.debug_barrier()  # the lists
        if num_first > 0:
            copy_listed(
                first_ptr,
                lists_ptr,
                num_copies,
                first_chunks,
                num_first,
                width,
                unit,
                chunk_units,
                vector_units,
                vector_bytes,
            )
        if is_marking and num_absent > 0:
            add_ready(ready_ptr, num_copies * first_chunks)

    # From here on, nothing that the first product waits for: whatever precedes READY delays it.
    if tl.program_id(0) == 0:
        keep_routed(routed_ptr, num_ids, ids, is_real, is_missing, ids_at_once)
        tl.store(header_ptr + _NUM_MISSES, num_misses)
        tl.store(header_ptr + _NUM_COPIES, num_copies)
        add_counts(counts_ptr, num_valid_rows, num_needed, num_hits, num_misses, num_copies)
        if is_admitting:
            tl.store(header_ptr + _NUM_NEEDED, num_needed)
            add_distances(distances_ptr, needed, position, num_seen, num_experts)

    if is_admitting:
        # Relaxed: the sum carries the order from this program's loads, and the stores below depend on the answer.
        num_arrived = tl.atomic_add(arrivals_ptr + expert, 1 + (sums >> 20), sem="relaxed")
        if num_second > 0:
            copy_listed(
                second_ptr,
                lists_ptr,
                num_copies,
                second_chunks,
                num_second,
                width,
                unit,
                chunk_units,
                vector_units,
                vector_bytes,
            )
        update_table(
            header_ptr,
            table_ptr,
            arrivals_ptr,
            num_arrived == tl.num_programs(0) - 1,
            needed,
            before,
            position,
            new_slot,
            num_needed,
            new_num_resident,
            num_seen,
            width,
        )


def plan_step(
    layer: LayerState,
    topk_ids: torch.Tensor,
    slot_ids: torch.Tensor,
    num_valid_rows: torch.Tensor,
    *,
    path: FetchPath = FetchPath.DECODE,
    gather: Gather | None = None,
    gather_after: Gather | None = None,
    blocks: Blocks | None = None,
    is_marking: bool = False,
    num_warps: int | None = None,
) -> None:
    """Plan one step of one layer on the current stream, and fetch what it misses; a graph may capture it.

    Args:
        layer: read and updated; its lists then name the misses.
        topk_ids: integer [rows, top_k], contiguous, at least one row; anything may stand in padding.
        slot_ids: integer [rows, top_k], contiguous, receives the slot of each id; `reference` says which values.
        num_valid_rows: int32 [1] on the device, rows that are real tokens; more than there are means all.
        path: DECODE is `LayerTable.plan`, STREAMED is `LayerTable.look_up`.
        gather: copies the experts that got a slot; None: that comes later, or never, as on the path STREAMED.
        gather_after: copies other parameters of them after that; it must be `Gather.is_like` the other.
        blocks: receives the blocks of the step's products.
        is_marking: add READY to ``layer.ready`` between the two; whoever waits for it must take it back.
        num_warps: None: `_PLANNING_WARPS` or `_COPYING_WARPS`.
    """
    assert topk_ids.is_contiguous()
    assert slot_ids.is_contiguous()
    assert slot_ids.shape == topk_ids.shape
    gathers = [given for given in (gather, gather_after) if given is not None]
    assert path is FetchPath.DECODE or not (gathers or is_marking)
    assert gather is None or gather_after is None or gather.is_like(gather_after)
    num_ids = topk_ids.numel()
    ids_at_once = min(max(triton.next_power_of_2(num_ids), _MIN_IDS_AT_ONCE), _MAX_IDS_AT_ONCE)
    is_few = num_ids * _FEW_IDS <= layer.num_experts
    _plan_kernel[(max((given.num_programs for given in gathers), default=1),)](
        topk_ids,
        slot_ids,
        num_ids,
        topk_ids.shape[1],
        num_valid_rows,
        layer.header,
        layer.table,
        layer.lists,
        layer.arrivals,
        layer.ready,
        layer.distances,
        layer.counts[path],
        layer.routed,
        **leading_arguments(gather, gather_after, unused=layer.counts),
        **block_arguments(blocks, unused=layer.header),
        num_experts=layer.num_experts,
        width=layer.table.shape[1],
        ids_at_once=ids_at_once,
        has_short_cut=is_marking and num_ids <= ids_at_once and (blocks is None or is_few),
        is_admitting=path is FetchPath.DECODE,
        is_marking=is_marking,
        num_warps=num_warps or (_COPYING_WARPS if gathers else _PLANNING_WARPS),
        **chained(layer.header),
    )
    for given in gathers:
        given.run(layer, is_leading_done=True)
