"""Prefetch by routing history for one layer, in plain Python: the kernel must equal it step by step.

What it guesses. Each expert has a weight that grows with every step that needs it and fades by a sixteenth per step.
Before a layer's step, the experts without a slot that have the largest weights are fetched, at most a given number.

What it may evict. First it fills free slots. Then a guess takes the place of the least recent resident, if history says
that it is used more often, and never of one that the layer's last step needed. The first guess that finds no place ends
the search. What a running step needs is safe in any case: a layer's prefetch is over before the layer is planned.

Order. The residents must stay the first of the recency stack. So guesses come last among the residents, in the order of
their weights, and those they have evicted right behind them; a guess that proves useless is the first to go. Distances
in the stack, and with them the curve of misses, are then those of LRU with prefetch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wisp_core.pager.device.reference import LayerTable, StepPlan

GAIN = 1024
"""What one use adds to an expert's weight."""

FADE_SHIFT = 4
"""A weight loses its 2**FADE_SHIFT-th part each step."""


@dataclass(slots=True)
class PrefetchCounts:
    """Experts; ``fetched == used + wasted + pending``."""

    fetched: int = 0
    used: int = 0  # needed by the next step that saw them
    wasted: int = 0  # gone without a use


@dataclass(slots=True)
class PrefetchingTable(LayerTable):
    """A layer's table with its history."""

    weight: npt.NDArray[np.int32] = field(init=False)
    pending: set[int] = field(default_factory=set)  # fetched, not used yet
    num_needed: int = 0  # of the last step
    prefetched: PrefetchCounts = field(default_factory=PrefetchCounts)

    def __post_init__(self) -> None:
        LayerTable.__post_init__(self)
        self.weight = np.zeros(self.num_experts, dtype=np.int32)

    def plan(self, topk_ids: npt.NDArray[np.integer], num_valid_rows: int | None = None) -> StepPlan:
        """As `LayerTable.plan`."""
        self.num_needed = len(self._needed(topk_ids, num_valid_rows))
        return LayerTable.plan(self, topk_ids, num_valid_rows)

    def prefetch(self, most: int) -> list[tuple[int, int]]:
        """Settle the last step's account and guess; returns ``(expert, slot)`` to copy, at most ``most``.

        Call it once before each `plan`.
        """
        self._settle()
        num_resident, evicted = len(self.slot_of), list[int]()
        guesses: list[tuple[int, int]] = []
        for expert in self._by_weight()[:most]:
            if len(self.slot_of) < self.cap:
                slot = len(self.slot_of)
            else:
                position = num_resident - 1 - len(evicted)
                victim = self.stack[position]
                if position < self.num_needed or self.weight[expert] <= self.weight[victim]:
                    break
                slot = self.slot_of.pop(victim)
                evicted.append(victim)
            self.slot_of[expert] = slot
            guesses.append((expert, slot))
        self._reorder(num_resident, [expert for expert, _ in guesses], evicted)
        self.prefetched.fetched += len(guesses)
        self.prefetched.wasted += len(self.pending.intersection(evicted))
        self.pending = (self.pending - set(evicted)) | {expert for expert, _ in guesses}
        return guesses

    def _settle(self) -> None:
        needed = self.stack[: self.num_needed]
        self.weight -= self.weight >> FADE_SHIFT
        self.weight[needed] += GAIN
        self.prefetched.used += len(self.pending.intersection(needed))
        self.pending -= set(needed)
        gone = {expert for expert in self.pending if expert not in self.slot_of}
        self.prefetched.wasted += len(gone)
        self.pending -= gone

    def _by_weight(self) -> list[int]:
        """Experts without a slot that were used before, the heaviest first; ties by ascending id."""
        missing = [e for e in range(self.num_experts) if e not in self.slot_of and self.weight[e] > 0]
        return sorted(missing, key=lambda expert: -int(self.weight[expert]))

    def _reorder(self, num_resident: int, guesses: list[int], evicted: list[int]) -> None:
        kept = num_resident - len(evicted)
        behind = [expert for expert in self.stack[num_resident:] if expert not in guesses]
        self.stack = self.stack[:kept] + guesses + self.stack[kept:num_resident] + behind
