"""Which experts of one layer are in which slot: the reference that every other implementation must equal.

Order. `wisp_core.working_set.order` alone decides residency: the resident experts are always the first of that order.
The miss curve is computed from the same order, so it predicts this table exactly.

Pins. No expert that the running step needs is evicted before the step has used it: a step whose distinct experts fit
the cap is planned at once with all of them pinned; a larger one is cut into sub-batches of rows that each fit.

Numpy only: no torch, no vLLM, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wisp_core.errors import IntegrityError
from wisp_core.working_set.order import NEVER, recency_keys

NOT_RESIDENT = -1
"""Entry of ``slot_of`` for an expert without a slot, and of ``expert_in`` for an empty slot."""

Copy = tuple[int, int]
"""``(expert, slot)``: this expert must be copied from the host into this slot."""

SlotMove = tuple[int, int]
"""``(from_slot, to_slot)``: the expert in the first slot must be copied to the second."""


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Rows ``[start, stop)`` of a step that one kernel call serves, after its copies were made in order."""

    start: int
    stop: int
    copies: list[Copy]
    slot_ids: npt.NDArray[np.int32]  # [stop - start, top_k]


class SlotTable:
    """Slots of one layer under LRU with pins."""

    def __init__(self, num_experts: int, cap: int) -> None:
        _check_cap(num_experts, cap)
        self.num_experts = num_experts
        self.cap = cap
        self.slot_of = np.full(num_experts, NOT_RESIDENT, dtype=np.int32)
        self.expert_in = np.full(num_experts, NOT_RESIDENT, dtype=np.int32)
        self.last_use = np.full(num_experts, NEVER, dtype=np.int64)
        self.num_rows_seen = 0

    def is_resident(self) -> npt.NDArray[np.bool_]:
        """Residency by expert, [E]."""
        return np.not_equal(self.slot_of, NOT_RESIDENT)

    def resident(self) -> tuple[int, ...]:
        """Ids of the experts in slots, ascending."""
        return tuple(np.flatnonzero(self.is_resident()).tolist())

    def plan(self, topk_ids: npt.NDArray[np.integer]) -> list[SubBatch]:
        """Plan one step and take it as done: the caller must carry out every sub-batch, in order.

        Args:
            topk_ids: expert ids [rows, top_k], distinct within a row.

        Returns:
            Sub-batches that cover all rows in order; one when the step's distinct experts fit the cap.

        Raises:
            ValueError: a row needs more experts than there are slots.
        """
        rows, top_k = topk_ids.shape
        if top_k > self.cap:
            raise ValueError(f"a row needs {top_k} experts, but the cap is {self.cap}")
        is_needed = np.zeros(self.num_experts, dtype=np.bool_)
        is_needed[topk_ids] = True
        needed = np.flatnonzero(is_needed)
        if len(needed) <= self.cap:
            copies = self._admit(needed, is_needed)
            batches = [SubBatch(0, rows, copies, self.slot_of[topk_ids])] if rows else []
        else:
            batches = self._plan_rows(topk_ids.tolist())
        # Repeated indices: numpy keeps the last assignment, which is the latest row.
        self.last_use[topk_ids.reshape(-1)] = self.num_rows_seen + np.repeat(np.arange(rows), top_k)
        self.num_rows_seen += rows
        return batches

    def set_cap(self, cap: int) -> list[SlotMove]:
        """Change the number of slots; the most recent ``cap`` experts stay.

        Returns:
            Moves that bring the staying experts below ``cap``. Sources lie at or above ``cap``, targets below and
            are distinct, so the order does not matter; they must be made before the upper slots lose their pages.
        """
        _check_cap(self.num_experts, cap)
        keys = recency_keys(self.last_use)
        resident = np.flatnonzero(self.is_resident())
        for expert in resident[np.argsort(-keys[resident])][cap:].tolist():
            self.expert_in[self.slot_of[expert]] = NOT_RESIDENT
            self.slot_of[expert] = NOT_RESIDENT
        self.cap = cap
        moves: list[SlotMove] = []
        free = iter(np.flatnonzero(self.expert_in[:cap] == NOT_RESIDENT).tolist())
        for source in (cap + np.flatnonzero(self.expert_in[cap:] != NOT_RESIDENT)).tolist():
            target = next(free)
            expert = int(self.expert_in[source])
            self.expert_in[source] = NOT_RESIDENT
            self._put(expert, target)
            moves.append((source, target))
        return moves

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots and experts match one to one and residency follows the order."""
        used = np.flatnonzero(self.expert_in != NOT_RESIDENT)
        resident = np.flatnonzero(self.is_resident())
        if len(used) and used[-1] >= self.cap:
            raise IntegrityError(f"slot {used[-1]} is in use, but the cap is {self.cap}")
        if len(used) != len(resident) or (self.slot_of[self.expert_in[used]] != used).any():
            raise IntegrityError(f"{len(used)} slots hold experts, {len(resident)} experts have slots, or they differ")
        order = np.argsort(-recency_keys(self.last_use))
        if set(order[: len(resident)].tolist()) != set(resident.tolist()):
            raise IntegrityError("an expert without a slot was used more recently than one with a slot")

    def _put(self, expert: int, slot: int) -> None:
        self.expert_in[slot] = expert
        self.slot_of[expert] = slot

    def _admit(self, needed: npt.NDArray[np.intp], is_needed: npt.NDArray[np.bool_]) -> list[Copy]:
        """Give every expert of ``needed`` a slot, evicting only experts that are not needed."""
        missing = needed[self.slot_of[needed] == NOT_RESIDENT]
        if not len(missing):
            return []
        slots = np.flatnonzero(self.expert_in[: self.cap] == NOT_RESIDENT)[: len(missing)].tolist()
        num_victims = len(missing) - len(slots)
        if num_victims:
            candidates = np.flatnonzero(self.is_resident() & ~is_needed)
            oldest = np.argsort(recency_keys(self.last_use)[candidates])[:num_victims]
            for victim in candidates[oldest].tolist():
                slots.append(int(self.slot_of[victim]))
                self.slot_of[victim] = NOT_RESIDENT
        copies = list(zip(missing.tolist(), slots, strict=True))
        for expert, slot in copies:
            self._put(expert, slot)
        return copies

    def _plan_rows(self, rows: list[list[int]]) -> list[SubBatch]:
        """Plain LRU row by row; rows join one sub-batch as long as their distinct experts fit the cap.

        A victim is the least recent resident. It was used in the open sub-batch only if all residents were, that is,
        if the sub-batch is full: so closing it there protects every expert that it uses.
        """
        resident = self.is_resident()
        order = np.argsort(recency_keys(self.last_use))
        lru = OrderedDict((e, int(self.slot_of[e])) for e in order[resident[order]].tolist())
        free = np.flatnonzero(self.expert_in[: self.cap] == NOT_RESIDENT)[::-1].tolist()
        batches: list[SubBatch] = []
        in_batch: set[int] = set()
        start, copies, slot_ids = 0, list[Copy](), list[list[int]]()
        for index, row in enumerate(rows):
            if len(in_batch.union(row)) > self.cap:
                batches.append(SubBatch(start, index, copies, np.array(slot_ids, dtype=np.int32)))
                in_batch.clear()
                start, copies, slot_ids = index, [], []
            copies += _touch(lru, row, free)
            slot_ids.append([lru[expert] for expert in row])
            in_batch.update(row)
        batches.append(SubBatch(start, len(rows), copies, np.array(slot_ids, dtype=np.int32)))
        self.slot_of.fill(NOT_RESIDENT)
        self.expert_in.fill(NOT_RESIDENT)
        for expert, slot in lru.items():
            self._put(expert, slot)
        return batches


def _touch(lru: OrderedDict[int, int], row: list[int], free: list[int]) -> list[Copy]:
    """Use the experts of one row in ``lru`` (oldest first, expert → slot); returns the copies made for it."""
    missing = [expert for expert in row if expert not in lru]
    for expert in row:
        if expert in lru:
            lru.move_to_end(expert)  # out of the victims' reach
    copies: list[Copy] = []
    for expert in sorted(missing):
        slot = free.pop() if free else lru.popitem(last=False)[1]
        lru[expert] = slot
        copies.append((expert, slot))
    for expert in sorted(row, reverse=True):  # same row: the smaller id counts as more recent
        lru.move_to_end(expert)
    return copies


def _check_cap(num_experts: int, cap: int) -> None:
    if not 0 < cap <= num_experts:
        raise ValueError(f"cap must be in 1..{num_experts} (the number of experts), got {cap}")
