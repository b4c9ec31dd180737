"""Cap kernel: changes how many slots the layers have, between steps, without the host.

It equals `wisp_core.pager.device.reference.LayerTable.set_cap` exactly.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from wisp_core.pager.device.reference import NO_SLOT
from wisp_core.pager.device.state import HEADER_WIDTH, DeviceState, Header, Lists, Table

_CAP = tl.constexpr(int(Header.CAP))
_NUM_RESIDENT = tl.constexpr(int(Header.NUM_RESIDENT))
_NUM_MISSES = tl.constexpr(int(Header.NUM_MISSES))
_NUM_COPIES = tl.constexpr(int(Header.NUM_COPIES))
_HEADER_WIDTH = tl.constexpr(HEADER_WIDTH)
_POSITION = tl.constexpr(int(Table.POSITION))
_SLOT = tl.constexpr(int(Table.SLOT))
_TABLE_HEIGHT = tl.constexpr(len(Table))
_SOURCE = tl.constexpr(int(Lists.SOURCE))
_TARGET = tl.constexpr(int(Lists.TARGET))
_FREED = tl.constexpr(int(Lists.FREED))
_LISTS_HEIGHT = tl.constexpr(len(Lists))
_NO_SLOT = tl.constexpr(NO_SLOT)


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
