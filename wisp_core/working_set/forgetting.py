"""Exponential forgetting: what is ``age`` seconds old weighs ``exp(-age / memory_s)``.

One rule for every measure, so that all of them look back equally far and their ratios belong together.
"""

from __future__ import annotations

import math

_LEAST = math.exp(-30.0)
"""Of two observations a long pause apart the older one still weighs this, so that a mean never becomes 0 / 0."""


class Forgetting:
    """Says how much of the past stays at each new observation."""

    def __init__(self, memory_s: float) -> None:
        """``memory_s`` is the mean age of what is remembered, seconds."""
        self.memory_s = memory_s
        self._last_s: float | None = None

    def keep(self, now_s: float) -> float:
        """Factor for everything observed before ``now_s``, and the clock moves there."""
        age_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return max(math.exp(-age_s / self.memory_s), _LEAST)

    def span_s(self, observed_s: float) -> float:
        """By what a decayed sum must be divided to be a rate, when observing began ``observed_s`` seconds ago."""
        return max(self.memory_s * -math.expm1(-observed_s / self.memory_s), 1e-3)


class DecayedSum:
    """A running sum that forgets."""

    def __init__(self, memory_s: float) -> None:
        self._memory = Forgetting(memory_s)
        self._sum = 0.0

    def add(self, now_s: float, amount: float) -> None:
        """Count ``amount`` now."""
        self._sum = self._sum * self._memory.keep(now_s) + amount

    def per_s(self, now_s: float, observed_s: float) -> float:
        """Mean rate over the memory or, early on, over the ``observed_s`` seconds since the start."""
        self.add(now_s, 0.0)
        return self._sum / self._memory.span_s(observed_s)
