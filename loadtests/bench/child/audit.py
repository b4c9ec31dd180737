"""The pager's counters against the trace: what should have been missed, recomputed from what was replayed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtests.bench.child.replay import Replay, StepRows
from wisp_core.pager.device.reference import LayerTable
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


class Audit:
    """The reference tables, replayed from where the engine's tables stood."""

    def __init__(self, pager: Any) -> None:
        """Copy the state of every layer; no request may be running."""
        self._pager = pager
        self._tables: list[SlotTable | LayerTable] = copy.deepcopy(pager.tables())
        self._counted_before = self._counted()

    def recount(self, replay: Replay, steps: list[StepRows]) -> Recount:
        """Replay ``steps``, which the engine has run since and finished. Call it once."""
        counted = self._counted() - self._counted_before
        per_step = [
            sum(
                _misses(table, replay.ids_of(step, layer).astype(np.int32), is_decode=step.is_decode)
                for layer, table in enumerate(self._tables)
            )
            for step in steps
        ]
        return Recount(per_step, counted)

    def _counted(self) -> int:
        return int(self._pager.counts_decode.misses + self._pager.counts_prefill.misses)


def _misses(table: SlotTable | LayerTable, ids: npt.NDArray[np.int32], *, is_decode: bool) -> int:
    """Experts that cross the link in one step of one layer; the step is taken as done."""
    if isinstance(table, SlotTable):
        if not is_decode:
            return len(set(ids.ravel().tolist()).difference(table.resident()))
        return sum(len(batch.copies) for batch in table.plan(ids))
    plan = table.plan(ids) if is_decode else table.look_up(ids)
    return len(plan.misses)
