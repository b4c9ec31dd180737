"""The one order of a layer's experts: last use, the most recent first, ties by ascending expert id.

One *time* is one routed row. The slot table evicts by this order and the miss curve predicts from it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NEVER = -1
"""Time of last use of an expert that was never used."""


def recency_keys(last_use: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One distinct integer per expert, larger for a more recent one; same shape as ``last_use`` [..., E]."""
    num_experts = last_use.shape[-1]
    tie_break: npt.NDArray[np.int64] = np.arange(num_experts - 1, -1, -1, dtype=np.int64)
    keys: npt.NDArray[np.int64] = last_use * num_experts + tie_break
    return keys
