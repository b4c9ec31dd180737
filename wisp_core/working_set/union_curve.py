"""How many experts a batch needs together: the union's size as a function of the number of decode rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wisp_core.working_set.forgetting import Forgetting


class UnionCurve:
    """Mean distinct experts of the first b rows, for every b seen; fixed memory [max_rows + 1]."""

    def __init__(self, max_rows: int, memory_s: float) -> None:
        """Rows of a step beyond ``max_rows`` are left out."""
        self._memory = Forgetting(memory_s)
        self._distinct = np.zeros(max_rows + 1)
        self._weight = np.zeros(max_rows + 1)

    def observe(self, topk_ids: npt.NDArray[np.integer], now_s: float) -> None:
        """Add one decode step of one layer, [rows, top_k]: a step of b rows tells about every smaller batch too."""
        ids = topk_ids[: len(self._distinct) - 1]
        if not len(ids):
            return
        _, first = np.unique(ids, return_index=True)
        new_by_row = np.bincount(first // ids.shape[1], minlength=len(ids))
        keep = self._memory.keep(now_s)
        self._distinct *= keep
        self._weight *= keep
        self._distinct[1 : len(ids) + 1] += np.cumsum(new_by_row)
        self._weight[1 : len(ids) + 1] += 1.0

    def sizes(self) -> tuple[float, ...]:
        """Index b: distinct experts of b rows, up to the largest batch that counts for something; empty before any."""
        known = np.flatnonzero(self._weight > 1e-3 * max(1.0, float(self._weight.max())))
        if not len(known):
            return ()
        stop = int(known[-1]) + 1
        return (0.0, *(self._distinct[1:stop] / self._weight[1:stop]).tolist())

    def reset(self) -> None:
        """Forget every step."""
        self._distinct.fill(0.0)
        self._weight.fill(0.0)
