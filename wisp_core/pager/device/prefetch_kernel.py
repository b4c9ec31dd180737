"""Prefetch kernel: one program guesses what one layer will need; it equals `prefetch_reference` exactly."""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from wisp_core.pager.device import reference
from wisp_core.pager.device.prefetch_reference import FADE_SHIFT, GAIN
from wisp_core.pager.device.state import Header, LayerState, Lists, Table

_CAP = tl.constexpr(int(Header.CAP))
_NUM_RESIDENT = tl.constexpr(int(Header.NUM_RESIDENT))
_NUM_COPIES = tl.constexpr(int(Header.NUM_COPIES))
_NUM_NEEDED = tl.constexpr(int(Header.NUM_NEEDED))
_POSITION = tl.constexpr(int(Table.POSITION))
_STACK = tl.constexpr(int(Table.STACK))
_SLOT = tl.constexpr(int(Table.SLOT))
_SOURCE = tl.constexpr(int(Lists.SOURCE))
_TARGET = tl.constexpr(int(Lists.TARGET))
_NO_SLOT = tl.constexpr(reference.NO_SLOT)
_GAIN = tl.constexpr(GAIN)
_FADE_SHIFT = tl.constexpr(FADE_SHIFT)

WEIGHT, PENDING = 0, 1
"""Rows of a layer's history."""
_WEIGHT, _PENDING = tl.constexpr(WEIGHT), tl.constexpr(PENDING)

FETCHED, USED, WASTED, SUMS_WIDTH = 0, 1, 2, 4
"""Entries of a layer's sums."""


@triton.jit
def _prefetch_kernel(
    header_ptr,
    table_ptr,
    history_ptr,
    copies_header_ptr,
    copies_lists_ptr,
    sums_ptr,
    num_experts: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    sums_width: tl.constexpr,
):
    expert = tl.arange(0, width)
    cap = tl.load(header_ptr + _CAP)
    num_resident = tl.load(header_ptr + _NUM_RESIDENT)
    num_needed = tl.load(header_ptr + _NUM_NEEDED)
    position = tl.load(table_ptr + _POSITION * width + expert)
    stack = tl.load(table_ptr + _STACK * width + expert)
    slot = tl.load(table_ptr + _SLOT * width + expert)
    weight = tl.load(history_ptr + _WEIGHT * width + expert)
    pending = tl.load(history_ptr + _PENDING * width + expert)

    needed = (position < num_needed).to(tl.int32)
    weight += needed * _GAIN - (weight >> _FADE_SHIFT)
    num_used = tl.sum(pending & needed)
    pending = pending & (1 - needed)
    is_gone = (pending != 0) & (slot == _NO_SLOT)
    num_wasted = tl.sum(is_gone.to(tl.int32))
    pending = tl.where(is_gone, 0, pending)

    # The expert breaks ties and makes keys distinct.
    key = tl.where((slot == _NO_SLOT) & (weight > 0) & (expert < num_experts), (weight << 10) | (1023 - expert), -1)
    new_slot = slot
    order = tl.full((width,), -1, tl.int32)  # in which a guess was made
    num_guesses = 0
    num_evicted = 0
    is_going = True
    for _ in tl.static_range(most):
        best = tl.max(key, 0)
        is_free = num_resident + num_guesses < cap
        victim_position = num_resident - 1 - num_evicted
        is_victim = position == victim_position
        victim_weight = tl.sum(tl.where(is_victim, weight, 0))
        is_heavier = (victim_position >= num_needed) & ((best >> 10) > victim_weight)
        is_going = is_going & (best >= 0) & (is_free | is_heavier)
        victim_slot = tl.sum(tl.where(is_victim, slot, 0))
        target = tl.where(is_free, num_resident + num_guesses, victim_slot)
        is_guess = (key == best) & is_going
        new_slot = tl.where(is_guess, target, new_slot)
        new_slot = tl.where(is_victim & is_going & (is_free == 0), _NO_SLOT, new_slot)
        tl.store(copies_lists_ptr + _SOURCE * width + num_guesses + expert * 0, expert, mask=is_guess)
        tl.store(copies_lists_ptr + _TARGET * width + num_guesses + expert * 0, new_slot, mask=is_guess)
        order = tl.where(is_guess, num_guesses, order)
        key = tl.where(is_guess, -1, key)
        num_evicted += tl.where(is_going & (is_free == 0), 1, 0)
        num_guesses += tl.where(is_going, 1, 0)

    is_guess = order >= 0
    guessed_at = tl.gather(is_guess.to(tl.int32), stack, 0)
    guessed_before = tl.gather(tl.cumsum(guessed_at, 0) - guessed_at, position, 0)
    num_kept = num_resident - num_evicted
    moved = tl.where(position < num_resident, position + num_guesses, position + num_guesses - guessed_before)
    new_position = tl.where(position < num_kept, position, moved)
    new_position = tl.where(is_guess, num_kept + order, new_position)

    is_evicted = (slot != _NO_SLOT) & (new_slot == _NO_SLOT)
    num_wasted += tl.sum(tl.where(is_evicted, pending, 0))
    pending = tl.where(is_evicted, 0, tl.where(is_guess, 1, pending))
    at = tl.arange(0, sums_width)
    step = tl.where(at == 0, num_guesses, tl.where(at == 1, num_used, tl.where(at == 2, num_wasted, 0))).to(tl.int64)
    tl.atomic_add(sums_ptr + at, step, sem="relaxed")
    tl.store(table_ptr + _POSITION * width + expert, new_position)
    tl.store(table_ptr + _STACK * width + new_position, expert)
    tl.store(table_ptr + _SLOT * width + expert, new_slot)
    tl.store(header_ptr + _NUM_RESIDENT, num_kept + num_guesses)
    tl.store(history_ptr + _WEIGHT * width + expert, weight)
    tl.store(history_ptr + _PENDING * width + expert, pending)
    tl.store(copies_header_ptr + _NUM_COPIES, num_guesses)


def guess(layer: LayerState, copies: LayerState, history: object, sums: object, most: int) -> None:
    """Guess for one layer on the current stream; a graph may capture it.

    Args:
        layer: its table is updated.
        copies: its lists and header receive the copies to make.
        history: int32 [2, width], rows WEIGHT and PENDING.
        sums: int64 [SUMS_WIDTH], in the order FETCHED, USED, WASTED.
        most: experts to fetch at most.
    """
    _prefetch_kernel[(1,)](
        layer.header,
        layer.table,
        history,
        copies.header,
        copies.lists,
        sums,
        num_experts=layer.num_experts,
        width=layer.table.shape[1],
        most=most,
        sums_width=SUMS_WIDTH,
        num_warps=4,
    )
