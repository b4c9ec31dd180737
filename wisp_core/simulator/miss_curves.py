"""What a simulated engine asks of the curves that say how many experts its steps miss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


class MissCurves(ABC):
    """Expected copies of a decode step, all layers together, by cap, batch and mix of topics.

    A *mix* is what of the topics matters for the misses, as a number that only these curves know the meaning of.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    @abstractmethod
    def mix(self, topics: Mapping[int, int]) -> int:
        """The mix of decoding turns, given by topic: how many."""

    @abstractmethod
    def by_cap(self, batch: int, mix: int) -> list[float]:
        """Copies per step of ``batch`` sessions at every cap, [E + 1]."""

    @abstractmethod
    def distinct_experts(self, batch: int, mix: int) -> float:
        """Different experts of such a step, all layers together."""

    @abstractmethod
    def distinct_by_batch(self, most: int) -> list[float]:
        """The same for 1 to ``most`` sessions of all kinds."""

    def comeback_misses(self, others: int, cap: int) -> float:
        """Copies beyond the usual of a topic that runs again after ``others`` different topics have."""
        return float(self.comeback_by_cap(others)[cap])

    def comeback_by_cap(self, others: int) -> npt.NDArray[np.float64]:
        """The same at every cap, [E + 1]."""
        return np.zeros(self.num_experts + 1)

    def missed_by_prompts(self, tokens: Mapping[int, int], cap: int, top_k: int) -> float:
        """Experts of a layer that so many prompt tokens by topic need and that ``cap`` slots do not hold."""
        return self.missed_by_prompt(sum(tokens.values()), cap, top_k)

    def missed_by_prompt(self, tokens: int, cap: int, top_k: int) -> float:
        """The same of one prompt, whatever its topic."""
        needed_share = 1.0 - (1.0 - top_k / self.num_experts) ** tokens
        return float(needed_share * (self.num_experts - cap))
