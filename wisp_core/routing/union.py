"""What a union of working sets costs in expert copies.

A step needs an expert unless none of its rows uses it: 1 - Π (1 - p), close to 1 - exp(-Σ p). With C slots per layer
the C most used experts tend to stay under LRU; every need of another one is a copy.

Arrays: ``uses`` are use rates summed over the rows of a step, ``[N, S, E]``, ``caps`` slots per layer, ``[N]`` from 1
to E. They are overwritten, since fresh arrays of this size cost as much as the arithmetic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Copies = npt.NDArray[np.float64]
"""Copies per step, summed over the S layers, [N]."""


def union_misses(uses: npt.NDArray[np.float32], caps: npt.NDArray[np.intp]) -> Copies:
    """Copies per step of whatever has these uses."""
    num_experts = uses.shape[-1]
    needs = _needs(uses)
    needs.sort(axis=-1)
    is_outside = np.arange(num_experts) < (num_experts - caps)[:, None]
    copies: Copies = np.einsum("nse,ne->n", needs, is_outside.astype(np.float32)).astype(np.float64)
    return copies


def union_misses_above(
    uses: npt.NDArray[np.float32], caps: npt.NDArray[np.intp], least_kept: npt.NDArray[np.float32]
) -> Copies:
    """The same without sorting, where the C-th largest use of each layer is known: ``least_kept`` ``[N, S]``.

    The C largest are θ and what they exceed it by, so what is left is Σ min(needs, θ) - C·θ.
    """
    threshold = _needs(least_kept.copy())
    needs = np.minimum(_needs(uses), threshold[:, :, None], out=uses)
    copies: Copies = (needs.sum(axis=(1, 2)) - caps * threshold.sum(axis=1)).astype(np.float64)
    return copies


def union_misses_by_cap(uses: npt.NDArray[np.float32]) -> Copies:
    """Copies per step of whatever has the uses [S, E], with every number of slots from 0 to E; [E + 1]."""
    needs = np.sort(_needs(uses.copy()), axis=-1).sum(axis=0, dtype=np.float64)
    return np.concatenate((np.cumsum(needs)[::-1], [0.0]))


def distinct_experts(uses: npt.NDArray[np.float32]) -> float:
    """Experts of all layers that a step with these uses needs."""
    return float(_needs(uses.copy()).sum())


def least_kept(rates: npt.NDArray[np.float32], cap: int) -> npt.NDArray[np.float32]:
    """The ``cap``-th largest rate of each layer, ``[S, E]`` to ``[S]``."""
    at = rates.shape[-1] - cap
    kept: npt.NDArray[np.float32] = np.partition(rates, at, axis=-1)[:, at]
    return kept


def _needs(uses: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    np.negative(uses, out=uses)
    np.expm1(uses, out=uses)
    return np.negative(uses, out=uses)
