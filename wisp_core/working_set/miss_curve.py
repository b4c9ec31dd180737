"""Miss curve of one layer: expert copies per step at every cap, from exact LRU stack distances.

Under LRU the resident set at cap C is the first C experts of one order (last use, the most recent first, ties by
ascending id), whatever C is (Mattson et al., 1970). So an expert's rank in that order before a step says for which
caps the step misses it: for C ≤ rank. An expert that was never used misses at every cap, E included.

What a step costs at cap C, exactly as `wisp_core.pager.slot_table.SlotTable` carries it out:

* distinct experts ≤ C: all are pinned, each is copied at most once: ``#{e needed : rank(e) ≥ C}``;
* distinct experts > C: the step is cut into sub-batches and costs plain LRU row by row, so distances count between
  *rows*: ``#{(row, e) : distance(row, e) ≥ C}``. An expert may then be copied several times in one step.

For C below top-k, where nothing can run, the second rule is used as it stands; at C = 0 every lookup misses.
Both rules fall as C grows, and the first never exceeds the second, so every curve is non-increasing.

A prefill is a pass of its own: it brings every expert without a slot once and changes no residency.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wisp_core.working_set.forgetting import Forgetting
from wisp_core.working_set.order import NEVER, recency_keys

_ROWS_AT_ONCE = 256  # bounds the [rows, top_k, E] comparison to a few MiB


def misses_by_cap(last_use: npt.NDArray[np.int64], topk_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Copies of one step at every cap.

    Args:
        last_use: time of each expert's last use before the step, `NEVER` if none; [E].
        topk_ids: expert ids of the step, distinct within a row; [rows, top_k].

    Returns:
        Copies at cap C in entry C; [E + 1].
    """
    num_experts = len(last_use)
    rank = _ranks(last_use)
    is_needed = np.zeros(num_experts, dtype=np.bool_)
    is_needed[topk_ids] = True
    pinned = _at_least(rank[is_needed], num_experts)
    num_distinct = int(np.count_nonzero(is_needed))
    if len(topk_ids) == 1:
        # One row: both rules agree from its own size up; below it, a row's experts cannot displace each other.
        return pinned
    by_row = _at_least(_row_distances(last_use, topk_ids), num_experts)
    return np.concatenate((by_row[:num_distinct], pinned[num_distinct:]))


def _ranks(last_use: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Place of each expert in the order, E if never used; [E]."""
    num_experts = len(last_use)
    rank = np.empty(num_experts, dtype=np.int64)
    rank[np.argsort(-recency_keys(last_use))] = np.arange(num_experts)
    rank[last_use == NEVER] = num_experts
    return rank


def _at_least(distances: npt.NDArray[np.int64], num_experts: int) -> npt.NDArray[np.int64]:
    """``#{d : d ≥ C}`` for C = 0..E; [E + 1]."""
    counts = np.bincount(distances.reshape(-1), minlength=num_experts + 1)
    return np.cumsum(counts[::-1])[::-1]


def _row_distances(last_use: npt.NDArray[np.int64], topk_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Rank of each looked-up expert just before its row, E if never used; [rows, top_k]."""
    num_experts = len(last_use)
    before = last_use
    distances = []
    for first in range(0, len(topk_ids), _ROWS_AT_ONCE):
        ids = topk_ids[first : first + _ROWS_AT_ONCE]
        rows = np.arange(len(ids))
        now = np.int64(before.max() + 1)
        # used[r] = last use of each expert before row r; row 0 is the state at the chunk's start. [rows + 1, E]
        used = np.full((len(ids) + 1, num_experts), NEVER, dtype=np.int64)
        used[0] = before
        used[rows[:, None] + 1, ids] = now + rows[:, None]
        np.maximum.accumulate(used, axis=0, out=used)
        keys = recency_keys(used[:-1])
        own = np.take_along_axis(keys, ids.astype(np.int64), axis=1)
        distance = (keys[:, None, :] > own[:, :, None]).sum(axis=2)
        distance[np.take_along_axis(used[:-1], ids.astype(np.int64), axis=1) == NEVER] = num_experts
        distances.append(distance)
        before = used[-1]
    return np.concatenate(distances) if distances else np.empty(topk_ids.shape, dtype=np.int64)


def pass_misses_by_cap(last_use: npt.NDArray[np.int64], topk_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Experts that a prefill brings over the link at every cap: each one without a slot once. Shapes as above."""
    num_experts = len(last_use)
    rank = _ranks(last_use)
    is_needed = np.zeros(num_experts, dtype=np.bool_)
    is_needed[topk_ids] = True
    return _at_least(rank[is_needed], num_experts)


class MissCurve:
    """Mean copies per step at every cap. A step weighs ``exp(-age / memory_s)``, so the curve follows phases.

    Memory is fixed, [E + 1]. The mean needs no step to be there: after a pause it is what it was.
    """

    def __init__(self, num_experts: int, memory_s: float) -> None:
        if memory_s <= 0:
            raise ValueError(f"memory_s must be positive, got {memory_s}")
        self._memory = Forgetting(memory_s)
        self._misses = np.zeros(num_experts + 1)
        self._weight = 0.0

    def observe(self, last_use: npt.NDArray[np.int64], topk_ids: npt.NDArray[np.integer], now_s: float) -> None:
        """Add one decode step; the arrays are those of `misses_by_cap`, taken before the step is planned."""
        self._add(misses_by_cap(last_use, topk_ids), now_s)

    def observe_pass(self, last_use: npt.NDArray[np.int64], topk_ids: npt.NDArray[np.integer], now_s: float) -> None:
        """Add one prefill; the arrays are those of `pass_misses_by_cap`."""
        self._add(pass_misses_by_cap(last_use, topk_ids), now_s)

    def expected(self) -> npt.NDArray[np.float64] | None:
        """Copies per step by cap, [E + 1]; None before the first step."""
        return self._misses / self._weight if self._weight else None

    def reset(self) -> None:
        """Forget every step."""
        self._misses.fill(0.0)
        self._weight = 0.0

    def _add(self, misses: npt.NDArray[np.int64], now_s: float) -> None:
        keep = self._memory.keep(now_s)
        self._misses *= keep
        self._misses += misses
        self._weight = self._weight * keep + 1.0
