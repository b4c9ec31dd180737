"""What a working set will be: from little evidence, or from that of others; and how many slots it needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wisp_core.working_set.signature import Usage, UseRates

PRIOR_TOKENS = 32.0
"""Decode tokens of one's own that weigh as much as everything that is known of others."""
PREFILL_TRUST = 0.25
"""What a prompt token tells of the decode steps to come, in decode tokens: a prompt uses more experts."""
MAX_PREFILL_TOKENS = 64.0
"""A prompt weighs no more than this many decode tokens, however long it is."""

LRU_MARGIN = 1.4
"""LRU does not keep the most used experts. On seeded traces, where experts repeat from token to token, it missed 0.7
to 1.0 times what they suggest at miss shares of 10 % and more, and up to 1.4 times below."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Use rates seen somewhere, and how many decode tokens they are worth."""

    rates: UseRates
    """``[L, E]``, uses per token."""
    tokens: float


def prefill_worth(prefill_tokens: int) -> float:
    """Decode tokens that the experts seen in a prefill are worth."""
    return min(PREFILL_TRUST * prefill_tokens, MAX_PREFILL_TOKENS)


def predict(evidence: Iterable[Evidence]) -> UseRates | None:
    """Use rates to expect, from evidence ordered from the most general to the most particular; None without any.

    Each kind of evidence is the prior of the next: with n tokens it moves the expectation by n / (n + PRIOR_TOKENS)
    of the difference. So a tenant's habits stand until its user is known, and a user's until the session is.
    """
    expected: UseRates | None = None
    for one in evidence:
        if expected is None or expected.shape != one.rates.shape:
            expected = one.rates
        else:
            share = np.float32(one.tokens / (one.tokens + PRIOR_TOKENS))
            expected = expected + share * (one.rates - expected)
    return expected


def miss_share_by_cap(usage: Usage) -> npt.NDArray[np.float64]:
    """Index C: the part of all uses that miss when each layer keeps its C most used experts; ``[E + 1]``.

    Args:
        usage: ``[L, E]``, counts or rates, in any scale; layers weigh alike.
    """
    totals = usage.sum(axis=1, keepdims=True, dtype=np.float64)
    shares = np.divide(usage, totals, out=np.zeros(usage.shape), where=totals > 0)
    kept = np.cumsum(-np.sort(-shares, axis=1), axis=1)[totals[:, 0] > 0]
    if not len(kept):
        return np.zeros(usage.shape[1] + 1)
    missed: npt.NDArray[np.float64] = 1.0 - np.concatenate([[0.0], kept.mean(axis=0)])
    return np.maximum(missed, 0.0)


def sampled_layers(num_layers: int, max_layers: int) -> npt.NDArray[np.intp]:
    """At most ``max_layers`` layers, evenly spread."""
    return np.round(np.linspace(0, num_layers - 1, min(num_layers, max_layers))).astype(np.intp)


def core_masks(usage: Usage, share: float, max_layers: int) -> list[int]:
    """The fewest experts that make up ``share`` of the uses, as bits: of at most ``max_layers`` layers of [L, E]."""
    masks = []
    for row in usage[sampled_layers(usage.shape[0], max_layers)]:
        by_use = np.argsort(-row, kind="stable")
        kept = np.cumsum(row[by_use])
        count = int(np.searchsorted(kept, share * kept[-1])) + 1 if kept[-1] > 0 else 0
        masks.append(sum(1 << int(expert) for expert in by_use[:count]))
    return masks


def safe_cap(usage: Usage, max_miss_share: float, min_cap: int = 1) -> int:
    """The predicted safe size of a working set: the smallest cap that keeps its miss share at ``max_miss_share``."""
    is_enough = miss_share_by_cap(usage) * LRU_MARGIN <= max_miss_share + 1e-9
    return max(min_cap, int(np.argmax(is_enough)))
