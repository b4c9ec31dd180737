"""How the decode misses of the sessions placed on a replica compare with those of the sessions that its curve saw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wisp_core.working_set.signature import Usage

_MOST = 4.0
"""Ratios stay within 1 / this and this: signatures are sketches of a few hundred tokens."""
_TAIL = 1e-3
"""Shares of uses below this are noise of such a sketch."""


def miss_ratio_by_cap(placed: Usage, seen: Usage) -> tuple[float, ...]:
    """Uses outside the C most used experts, of those placed over those seen, for C = 0..E.

    Both are taken as independent draws with these frequencies, for which the C most used experts are what LRU tends to
    keep; errors of that assumption are in both and cancel.

    Args:
        placed: use counts or weights of the placed sessions together, [L, E].
        seen: the same of everything that the replica decoded lately, [L, E].

    Returns:
        [E + 1]; empty where one of them says nothing.
    """
    outside_placed, outside_seen = _outside(placed), _outside(seen)
    if outside_placed is None or outside_seen is None:
        return ()
    ratios = (outside_placed + _TAIL) / (outside_seen + _TAIL)
    return tuple(np.clip(ratios, 1 / _MOST, _MOST).tolist())


def _outside(usage: Usage) -> npt.NDArray[np.float64] | None:
    """Share of all uses outside the C most used experts of their layer, mean over layers, [E + 1]."""
    totals = usage.sum(axis=1, keepdims=True, dtype=np.float64)
    if usage.size == 0 or not (totals > 0).any():
        return None
    known = totals[:, 0] > 0
    shares = np.sort(usage[known] / totals[known], axis=1)[:, ::-1]
    kept = np.concatenate((np.zeros((len(shares), 1)), np.cumsum(shares, axis=1)), axis=1)
    outside: npt.NDArray[np.float64] = np.maximum(0.0, 1.0 - kept.mean(axis=0))
    return outside
