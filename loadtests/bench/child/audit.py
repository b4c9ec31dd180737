"""The pager's counters against the trace: what should have been missed, recomputed from what was replayed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from loadtests.bench.child.replay import Replay, StepRows
from wisp_core.pager.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class Recount:
    """Misses of a run of steps, all layers."""

    per_step: list[int]
    counted: int  # by the pager

    @property
    def is_equal(self) -> bool:
        """Whether the pager counted what the trace says."""
        return sum(self.per_step) == self.counted


class HostAudit:
    """For the pager that plans on the host: the reference tables, replayed from where the engine's stood."""

    def __init__(self, pager: Any) -> None:
        """Copy the state of every layer; no request may be running."""
        self._pager = pager
        self._tables: list[SlotTable] = copy.deepcopy(pager.tables())
        self._counted_before = self._counted()

    def recount(self, replay: Replay, steps: list[StepRows]) -> Recount:
        """Replay ``steps``, which the engine has run since. Call it once."""
        per_step = [sum(self._misses(replay, step, layer) for layer in range(len(self._tables))) for step in steps]
        return Recount(per_step, self._counted() - self._counted_before)

    def _misses(self, replay: Replay, step: StepRows, layer: int) -> int:
        batches = self._tables[layer].plan(replay.ids_of(step, layer).astype("int32"))
        return sum(len(batch.copies) for batch in batches)

    def _counted(self) -> int:
        return int(self._pager.counts_decode.misses + self._pager.counts_prefill.misses)
