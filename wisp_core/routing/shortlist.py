"""The few replicas that are worth an exact look."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wisp_core.routing.filter import Mask
from wisp_core.routing.fleet import Fleet
from wisp_core.routing.load import Column
from wisp_core.routing.views import Uses


def sketched_experts_s(uses: Uses | None, fleet: Fleet, tokens: int) -> Column:
    """Seconds of expert copies on every replica, where a turn adds those of its heaviest uses only, [N]."""
    token_s = fleet.load.copies_s
    if uses is not None and fleet.outside.shape[0] == uses.rates.size:
        positions, rates = uses.sketch
        token_s = token_s + (rates @ fleet.outside[positions]) * fleet.load.use_s
    seconds: Column = tokens * token_s
    return seconds


def shortlist(total_s: Column, candidates: Mask, num_scored: int, home: int | None) -> npt.NDArray[np.intp]:
    """Positions of the candidates of least cost, and the home if it is one; of more than ``num_scored`` replicas."""
    eligible_s = np.where(candidates, total_s, np.inf)
    found = np.argpartition(eligible_s, num_scored - 1)[:num_scored]
    found = found[candidates[found]]
    if home is not None and candidates[home] and home not in found:
        found = np.append(found, home)
    return found
