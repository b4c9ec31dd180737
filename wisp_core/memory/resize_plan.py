"""Whether a split may be put into effect, and what it takes: the pure half of a resize."""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.contracts import MemoryLayout, Outcome, Split


@dataclass(frozen=True, kw_only=True)
class Move:
    """Changes of both pools; KV in groups, the null group counted."""

    cap_before: int
    cap_after: int
    groups_before: int
    groups_after: int
    bytes_moved: int

    @property
    def is_hold(self) -> bool:
        """Whether nothing changes."""
        return self.cap_before == self.cap_after and self.groups_before == self.groups_after

    @property
    def num_leaving(self) -> int:
        """Groups that KV gives up."""
        return max(0, self.groups_before - self.groups_after)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part of a move: KV groups go, then the cap changes, then groups come."""

    num_unmapped: int
    cap: int
    num_mapped: int


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a split is not put into effect."""

    outcome: Outcome
    reason: str


def plan_moves(
    layout: MemoryLayout, *, budget_bytes: int, before: Split, target: Split, floor_blocks: int
) -> list[Move] | Refusal:
    """Check ``target`` and say what to change: the move there, then shorter ones for fewer free groups.

    Blocks beyond the target's that share its last group become usable too, since their pages are paid. Of a move that
    turns KV into slots, a part is worth having: as many groups as pay for one slot more, or two, and so on.

    Args:
        layout: Sizes of the engine.
        budget_bytes: What both pools may hold together.
        before: The split in effect.
        target: The split asked for.
        floor_blocks: κ_min of the turns that run now, without the null block.
    """
    groups_before = layout.groups_for_blocks(before.kv_blocks)
    groups_after = layout.groups_for_blocks(target.kv_blocks)
    if before.cap == target.cap and groups_before == groups_after:
        return [_move(layout, before, groups_before, before.cap, groups_before)]
    usable_after = layout.usable_blocks(groups_after)
    if reason := _impossible(layout, budget_bytes, target, usable_after):
        return Refusal(outcome=Outcome.FAILED, reason=reason)
    moves = [_move(layout, before, groups_before, target.cap, groups_after)]
    if groups_after < groups_before:
        for cap in range(target.cap - 1, before.cap, -1):
            groups = affordable_groups(layout, budget_bytes, cap)
            if moves[-1].groups_after < groups < groups_before:
                moves.append(_move(layout, before, groups_before, cap, groups))
        moves = [move for move in moves if layout.usable_blocks(move.groups_after) >= floor_blocks]
    if not moves:
        return Refusal(
            outcome=Outcome.DEFERRED,
            reason=f"{usable_after} KV blocks are below the {floor_blocks} that running turns need (κ_min), and no "
            "move of fewer pays for a slot",
        )
    return moves


def affordable_groups(layout: MemoryLayout, budget_bytes: int, cap: int) -> int:
    """KV groups, the null group counted, that the budget holds beside ``cap`` slots."""
    return (budget_bytes - layout.experts_bytes_by_cap[cap]) // layout.kv_group_bytes


def _move(layout: MemoryLayout, before: Split, groups_before: int, cap_after: int, groups_after: int) -> Move:
    experts = layout.experts_bytes_by_cap
    kv_bytes = abs(groups_after - groups_before) * layout.kv_group_bytes
    return Move(
        cap_before=before.cap,
        cap_after=cap_after,
        groups_before=groups_before,
        groups_after=groups_after,
        bytes_moved=max(kv_bytes, abs(experts[cap_after] - experts[before.cap])),
    )


def steps_of(move: Move, layout: MemoryLayout, *, budget_bytes: int, step_bytes: int) -> list[Step]:
    """Cut ``move`` into steps of about ``step_bytes``, a cap or a group at the least.

    Between any two the pools fit the budget, so the giver's share of a step never comes after the taker's.
    """
    num_steps = max(1, -(-move.bytes_moved // step_bytes))
    groups_change = move.groups_after - move.groups_before
    steps: list[Step] = []
    cap, groups = move.cap_before, move.groups_before
    for index in range(1, num_steps + 1):
        cap_then = move.cap_before + (move.cap_after - move.cap_before) * index // num_steps
        groups_then = move.groups_before + groups_change * index // num_steps
        groups_then = min(groups_then, affordable_groups(layout, budget_bytes, cap_then))
        groups_then = max(groups_then, min(move.groups_before, move.groups_after))
        if index == num_steps:
            cap_then, groups_then = move.cap_after, move.groups_after
        step = Step(num_unmapped=max(0, groups - groups_then), cap=cap_then, num_mapped=max(0, groups_then - groups))
        if step.num_unmapped or step.num_mapped or cap_then != cap:
            steps.append(step)
        cap, groups = cap_then, groups_then
    return steps


def _impossible(layout: MemoryLayout, budget_bytes: int, target: Split, usable_after: int) -> str | None:
    if not layout.is_paged and target.cap != layout.num_experts:
        return f"the whole model fits, so its {layout.num_experts} experts are not paged and there is nothing to move"
    if not layout.min_cap <= target.cap <= layout.num_experts:
        return f"cap {target.cap} is outside [{layout.min_cap}, {layout.num_experts}]"
    if usable_after > layout.max_kv_blocks:
        return f"{usable_after} KV blocks are more than the address range's {layout.max_kv_blocks}"
    if usable_after < layout.longest_request_blocks:
        return (
            f"{usable_after} KV blocks are below κ_min: a request of max_model_len {layout.max_model_len} tokens "
            f"needs {layout.longest_request_blocks}"
        )
    needed_bytes = layout.pool_bytes(Split(cap=target.cap, kv_blocks=usable_after))
    if needed_bytes > budget_bytes:
        return f"the split needs {needed_bytes} bytes, the budget is {budget_bytes}"
    return None
