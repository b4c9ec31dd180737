"""How many experts a step misses by who runs, from the working sets of topics.

A decode step needs an expert unless none of its rows uses it: 1 - Π (1 - p). Slots hold what was used last. Were all
steps drawn anew, C slots would keep an expert for the same number of steps T, whichever it is (Che, Tung and Wang,
2002)::

    Σ 1 - (1 - need)^T = C        misses = Σ need · (1 - need)^T

Real turns come and go, and repeat themselves; what that changes is one ratio, which a recording tells
(`wisp_core.simulator.calibration`). A prompt's tokens need experts in the same way and find those that decode steps
use most: prefills leave the slots alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import numpy as np
import numpy.typing as npt

from wisp_core.simulator.miss_curves import MissCurves
from wisp_core.working_set.signature import UseRates

FloatArray = npt.NDArray[np.float64]

_MOST_SURE = 1.0 - 1e-6
_STEPS_KEPT = 2.0 ** np.arange(-4.0, 16.0, 0.25)
"""T for which occupied slots and misses are worked out; between them lie straight lines."""


class TopicCurves(MissCurves):
    """Curves of sessions that are on topics, each with a working set of its own."""

    def __init__(self, rates: UseRates, *, ratio: float = 1.0, prompt_rates: UseRates | None = None) -> None:
        """Take over what was measured.

        Args:
            rates: uses per decode token of each topic, [topics, L, E].
            ratio: real misses of decode steps over those of independent ones.
            prompt_rates: uses per prompt token, likewise; None: each token draws its experts from all alike.
        """
        super().__init__(rates.shape[-1])
        self.rates, self.ratio, self.prompt_rates = rates, ratio, prompt_rates
        self._unused = _log_unused(rates)
        self._prompt_unused = None if prompt_rates is None else _log_unused(prompt_rates)
        self._most_used_last = np.argsort(rates.mean(axis=0), axis=-1)
        self._number_of: dict[tuple[int, ...], int] = {}
        self._needs: list[FloatArray] = []  # by mix, of the whole batch, [L, E]
        self._by_mix: dict[int, list[float]] = {}
        self._by_prompts: dict[tuple[tuple[int, int], ...], FloatArray] = {}

    def mix(self, topics: Mapping[int, int]) -> int:
        """One for each different number of turns by topic."""
        turns = tuple(topics.get(topic, 0) for topic in range(len(self.rates)))
        number = self._number_of.get(turns)
        if number is None:
            number = self._number_of[turns] = len(self._needs)
            self._needs.append(-np.expm1(np.tensordot(turns, self._unused, axes=1)))
        return number

    def by_cap(self, batch: int, mix: int) -> list[float]:
        """Copies per step at every cap; no cap misses more than a smaller one."""
        found = self._by_mix.get(mix)
        if found is None:
            misses = lru_misses_by_cap(self._needs[mix])
            found = self._by_mix[mix] = np.minimum(misses * self.ratio, misses[0]).tolist()
        return found

    def distinct_experts(self, batch: int, mix: int) -> float:
        """All that the batch needs."""
        return float(self._needs[mix].sum())

    def distinct_by_batch(self, most: int) -> list[float]:
        """As if every topic had the same share of the sessions."""
        unused = _log_unused(self.rates.mean(axis=0))
        return [float(-np.expm1(unused * batch).sum()) for batch in range(1, most + 1)]

    def missed_by_prompt(self, tokens: int, cap: int, top_k: int) -> float:
        """Mean over the topics."""
        if self._prompt_unused is None:
            return super().missed_by_prompt(tokens, cap, top_k)
        return fmean(self.missed_by_prompts({topic: tokens}, cap, top_k) for topic in range(len(self.rates)))

    def missed_by_prompts(self, tokens: Mapping[int, int], cap: int, top_k: int) -> float:
        """Experts of a layer that these prompts need beyond the ``cap`` that all topics' decode steps use most."""
        if self._prompt_unused is None:
            return super().missed_by_prompts(tokens, cap, top_k)
        key = tuple(sorted(tokens.items()))
        found = self._by_prompts.get(key)
        if found is None:
            unused = sum(self._prompt_unused[topic] * count for topic, count in key)
            needs = np.take_along_axis(-np.expm1(unused), self._most_used_last, axis=-1).mean(axis=0)
            found = self._by_prompts[key] = np.concatenate((np.cumsum(needs)[::-1], [0.0]))
        return float(found[cap])

    def use_rates(self, num_topics: int) -> UseRates:
        """What a router may know: the first ``num_topics`` topics' uses per decode token."""
        return self.rates[:num_topics]


def lru_misses_by_cap(needs: FloatArray) -> FloatArray:
    """Misses of a step that needs each expert with a probability of its own, [L, E], at every cap; [E + 1]."""
    num_experts = needs.shape[-1]
    gone = np.exp(_STEPS_KEPT[:, None, None] * np.log1p(-np.minimum(needs, _MOST_SURE)))
    none = np.zeros((1, len(needs)))
    occupied = np.concatenate((none, (1.0 - gone).sum(axis=-1)))  # [T, L]
    missed = np.concatenate((needs.sum(axis=-1)[None], (needs * gone).sum(axis=-1)))
    caps = np.arange(num_experts + 1)
    by_layer = [np.interp(caps, occupied[:, at], missed[:, at], right=0.0) for at in range(len(needs))]
    misses: FloatArray = np.sum(by_layer, axis=0)
    return misses


def _log_unused(rates: UseRates) -> FloatArray:
    """Logarithm of the probability that one token leaves an expert alone."""
    unused: FloatArray = np.log1p(-np.minimum(rates.astype(np.float64), _MOST_SURE))
    return unused
