"""The device pager's algorithm for one layer, in plain Python: the kernels must equal it step by step.

Order. The experts of a layer form one recency stack. A step moves the experts that it needs to the front and keeps
their former order, and the order of the others. So ties of last use go to the use before, and so on; experts that
were never used stay in ascending id.

Why this tie-break. A step needs a *set* of experts, which may be larger than the cap. With this order, and with this
order alone, the residents are the first experts of the stack at every cap and after every step, also after one that
overflows: an expert's position before a step says for which caps the step misses it (cap ≤ position), and the curve
of misses over caps is exact at every cap. Keys such as ``(last use, id)`` lose that as soon as a step overflows.

Overflow. A step that needs D > C experts keeps its hits, gives the slots of all others to its first missing experts
in the order of the stack, and leaves D - C without a slot. Their rows carry ``num_experts + expert`` as slot id, and
whoever runs the experts serves them from elsewhere. Every missing expert crosses the link once, whatever the cap.

Slots. The residents always occupy slots ``0 .. num_resident - 1``, so free slots need no list.

Padding. Rows from ``num_valid_rows`` on and ids outside ``0 .. num_experts - 1`` are ignored: they need no expert,
count nowhere, and get slot id 0, which is safe to read at any cap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wisp_core.errors import IntegrityError

PADDING_SLOT = 0
"""Slot id of ignored entries."""

NO_SLOT = -1
"""Second entry of a miss that got no slot."""

Miss = tuple[int, int]
"""``(expert, slot)``: this expert must come over the link, into this slot or, with `NO_SLOT`, to elsewhere."""

SlotMove = tuple[int, int]
"""``(from_slot, to_slot)``: the expert in the first slot must be copied to the second."""


@dataclass(slots=True)
class StepCounts:
    """Sums over the steps of one layer."""

    steps: int = 0
    rows: int = 0
    distinct: int = 0
    hits: int = 0
    misses: int = 0  # experts that crossed the link, overflow included
    overflow: int = 0  # misses that got no slot


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step asks for."""

    slot_ids: npt.NDArray[np.int64]  # [rows, top_k]
    misses: list[Miss]  # those with a slot first
    num_copies: int  # misses with a slot


@dataclass(slots=True)
class LayerTable:
    """Recency stack and slots of one layer."""

    num_experts: int
    cap: int
    stack: list[int] = field(init=False)  # experts, the most recent first
    slot_of: dict[int, int] = field(init=False)  # residents only
    num_seen: int = 0  # experts ever used: the first of the stack
    distances: npt.NDArray[np.int64] = field(init=False)  # [num_experts + 1] uses by stack position, last: first uses
    decode: StepCounts = field(default_factory=StepCounts)
    streamed: StepCounts = field(default_factory=StepCounts)

    def __post_init__(self) -> None:
        if not 0 < self.cap <= self.num_experts:
            raise ValueError(f"cap must be in 1..{self.num_experts} (the number of experts), got {self.cap}")
        self.stack = list(range(self.num_experts))
        self.slot_of = {}
        self.distances = np.zeros(self.num_experts + 1, dtype=np.int64)

    def plan(self, topk_ids: npt.NDArray[np.integer], num_valid_rows: int | None = None) -> StepPlan:
        """Plan one decode step and take it as done: the caller must make the copies before the slots are read.

        Args:
            topk_ids: routed expert ids [rows, top_k]; anything may stand in rows that are padding.
            num_valid_rows: rows that are real tokens; None: all.
        """
        needed = self._needed(topk_ids, num_valid_rows)
        hits, missing = self._split(needed)
        num_copies = min(len(missing), self.cap - len(hits))
        for position, expert in enumerate(self.stack):
            if expert in needed:
                self.distances[position if position < self.num_seen else self.num_experts] += 1
        self.num_seen += sum(expert in needed for expert in self.stack[self.num_seen :])
        self._admit(missing[:num_copies], needed)
        self.stack = [e for e in self.stack if e in needed] + [e for e in self.stack if e not in needed]
        misses = [(expert, self.slot_of.get(expert, NO_SLOT)) for expert in missing]
        _count(self.decode, topk_ids, num_valid_rows, len(hits), misses)
        return StepPlan(self._slot_ids(topk_ids, num_valid_rows), misses, num_copies)

    def look_up(self, topk_ids: npt.NDArray[np.integer], num_valid_rows: int | None = None) -> StepPlan:
        """Plan a step that streams its missing experts and leaves the working set of the decode steps alone."""
        hits, missing = self._split(self._needed(topk_ids, num_valid_rows))
        misses = [(expert, NO_SLOT) for expert in missing]
        _count(self.streamed, topk_ids, num_valid_rows, len(hits), misses)
        return StepPlan(self._slot_ids(topk_ids, num_valid_rows), misses, num_copies=0)

    def set_cap(self, cap: int) -> list[SlotMove]:
        """Change the number of slots between steps; the most recent ``cap`` experts stay.

        Returns:
            Moves into the slots below ``cap``, from slots at or above it: in any order, before the pages go.
        """
        if not 0 < cap <= self.num_experts:
            raise ValueError(f"cap must be in 1..{self.num_experts} (the number of experts), got {cap}")
        residents = [expert for expert in self.stack if expert in self.slot_of]
        freed = [self.slot_of.pop(expert) for expert in sorted(residents[cap:])]
        targets = iter([slot for slot in freed if slot < cap])
        moves: list[SlotMove] = []
        for expert in sorted(residents[:cap]):
            if self.slot_of[expert] >= cap:
                source, self.slot_of[expert] = self.slot_of[expert], next(targets)
                moves.append((source, self.slot_of[expert]))
        self.cap = cap
        return moves

    def misses_by_cap(self) -> npt.NDArray[np.int64]:
        """Entry C: experts that the decode steps would have copied at cap C, overflow included; [num_experts + 1]."""
        return np.cumsum(self.distances[::-1])[::-1]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the residents lead the stack and fill the first slots, one each."""
        num_resident = len(self.slot_of)
        if sorted(self.stack) != list(range(self.num_experts)):
            raise IntegrityError(f"the stack is not a permutation of {self.num_experts} experts: {self.stack}")
        if num_resident > self.cap or sorted(self.slot_of.values()) != list(range(num_resident)):
            raise IntegrityError(f"cap {self.cap}: residents do not fill the first slots: {self.slot_of}")
        if set(self.stack[:num_resident]) != set(self.slot_of):
            raise IntegrityError("an expert without a slot was used more recently than one with a slot")

    def _needed(self, topk_ids: npt.NDArray[np.integer], num_valid_rows: int | None) -> set[int]:
        ids = set(topk_ids[:num_valid_rows].reshape(-1).tolist())
        return {expert for expert in ids if 0 <= expert < self.num_experts}

    def _split(self, needed: set[int]) -> tuple[list[int], list[int]]:
        """Hits and missing experts among ``needed``, in the order of the stack."""
        ordered = [expert for expert in self.stack if expert in needed]
        return [e for e in ordered if e in self.slot_of], [e for e in ordered if e not in self.slot_of]

    def _admit(self, experts: list[int], needed: set[int]) -> None:
        """Give every expert a slot: free ones first, then those of the least recent experts not in ``needed``."""
        victims = (e for e in reversed(self.stack) if e in self.slot_of and e not in needed)
        for expert in experts:
            if len(self.slot_of) < self.cap:
                self.slot_of[expert] = len(self.slot_of)
            else:
                self.slot_of[expert] = self.slot_of.pop(next(victims))

    def _slot_ids(self, topk_ids: npt.NDArray[np.integer], num_valid_rows: int | None) -> npt.NDArray[np.int64]:
        table = {e: self.slot_of.get(e, self.num_experts + e) for e in range(self.num_experts)}
        slot_ids = np.full(topk_ids.shape, PADDING_SLOT, dtype=np.int64)
        for at, expert in np.ndenumerate(topk_ids[:num_valid_rows]):
            slot_ids[at] = table.get(int(expert), PADDING_SLOT)
        return slot_ids


def _count(
    counts: StepCounts,
    topk_ids: npt.NDArray[np.integer],
    num_valid_rows: int | None,
    num_hits: int,
    misses: list[Miss],
) -> None:
    counts.steps += 1
    counts.rows += len(topk_ids[:num_valid_rows])
    counts.distinct += num_hits + len(misses)
    counts.hits += num_hits
    counts.misses += len(misses)
    counts.overflow += sum(slot == NO_SLOT for _, slot in misses)
