"""How many experts a decode step misses by who decodes: the router's union of working sets, times what was measured.

The product's routing takes a batch to miss whatever it needs beyond the C most used experts
(`wisp_core.routing.union`). Real slots hold what was used last, and turns come and go, so that more is missed; by how
much is one ratio per cap, which a recording tells (`wisp_core.simulator.calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from wisp_core.routing.union import distinct_experts, union_misses_by_cap
from wisp_core.simulator.miss_curves import MissCurves
from wisp_core.working_set.signature import UseRates

FloatArray = npt.NDArray[np.float64]


class TopicCurves(MissCurves):
    """Curves of sessions that are on topics, each with a working set of its own."""

    def __init__(self, rates: UseRates, ratio_by_cap: FloatArray) -> None:
        """Take over what was measured.

        Args:
            rates: uses per decode token of each topic, [topics, L, E].
            ratio_by_cap: real misses over those of the union, [E + 1].
        """
        super().__init__(rates.shape[-1])
        self.rates = rates
        self.ratio_by_cap = ratio_by_cap
        self._number_of: dict[tuple[int, ...], int] = {}
        self._uses: list[UseRates] = []  # by mix: of the whole batch, [L, E]
        self._by_mix: dict[int, list[float]] = {}

    def mix(self, topics: Mapping[int, int]) -> int:
        """One for each different number of turns by topic."""
        turns = tuple(topics.get(topic, 0) for topic in range(len(self.rates)))
        number = self._number_of.get(turns)
        if number is None:
            number = self._number_of[turns] = len(self._uses)
            self._uses.append(np.tensordot(np.array(turns, dtype=np.float32), self.rates, axes=1))
        return number

    def by_cap(self, batch: int, mix: int) -> list[float]:
        """Copies per step at every cap; no cap misses more than a smaller one."""
        found = self._by_mix.get(mix)
        if found is None:
            misses = union_misses_by_cap(self._uses[mix]) * self.ratio_by_cap
            found = self._by_mix[mix] = np.minimum.accumulate(misses).tolist()
        return found

    def distinct_experts(self, batch: int, mix: int) -> float:
        """All that the batch needs."""
        return distinct_experts(self._uses[mix])

    def distinct_by_batch(self, most: int) -> list[float]:
        """As if every topic had the same share of the sessions."""
        mean = self.rates.mean(axis=0)
        return [distinct_experts(mean * batch) for batch in range(1, most + 1)]

    def use_rates(self, num_topics: int) -> UseRates:
        """What a router may know: the first ``num_topics`` topics' uses per decode token."""
        return self.rates[:num_topics]
