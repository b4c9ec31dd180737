"""How the decode misses of the sessions placed on a replica compare with those of the sessions that its curve saw."""

from __future__ import annotations

import numpy as np

from wisp_core.working_set.predictor import miss_share_by_cap
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
    if not placed.any() or not seen.any():
        return ()
    ratios = (miss_share_by_cap(placed) + _TAIL) / (miss_share_by_cap(seen) + _TAIL)
    return tuple(np.clip(ratios, 1 / _MOST, _MOST).tolist())
