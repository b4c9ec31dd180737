"""What turns ask for, per second: a turn counts in full as long as it is there, and fades once it has ended.

Rates of admissions alone lose sight of turns that last longer than the window, which are the ones that matter most
where the pool is too small; and a phase that begins is known from its first turns, those that still wait among them,
not from their end.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from wisp_core.working_set.forgetting import Forgetting

_DURATION_MEMORIES = 4.0
"""Mean durations look back further than the amounts: few turns end within one memory where turns are slow."""

Amounts = npt.NDArray[np.float64]
"""What one turn asks for, one number a kind; [kinds]."""


class TurnWindow:
    """Sums over turns; one that ended ``memory_s`` seconds ago weighs 1/e."""

    def __init__(self, num_kinds: int, memory_s: float) -> None:
        self._memory = Forgetting(memory_s)
        self._duration = Forgetting(_DURATION_MEMORIES * memory_s)
        self._present: dict[Hashable, tuple[float, Amounts]] = {}
        self._ended = np.zeros(num_kinds)
        self._ended_turns = 0.0
        self._ended_s = 0.0

    def begin(self, turn: Hashable, amounts: Amounts, now_s: float) -> None:
        """A turn has come."""
        self._present.setdefault(turn, (now_s, amounts))

    def revise(self, turn: Hashable, amounts: Amounts) -> None:
        """More is known of a turn that is there, as once it is admitted; of any other nothing changes."""
        if turn in self._present:
            self._present[turn] = (self._present[turn][0], amounts)

    def learn(self, turn: Hashable, kind: int, amount: float) -> None:
        """One of its amounts is known better, while it runs or at its end."""
        if turn in self._present:
            self._present[turn][1][kind] = amount

    def forget(self, turn: Hashable) -> None:
        """It has gone without having been admitted, and asks for nothing."""
        self._present.pop(turn, None)

    def end(self, turn: Hashable, now_s: float) -> None:
        """It has ended; one that never began does not count."""
        began_s, amounts = self._present.pop(turn, (None, None))
        if began_s is None or amounts is None:
            return
        self._fade(now_s)
        self._ended += amounts
        keep = self._duration.keep(now_s)
        self._ended_turns = keep * self._ended_turns + 1.0
        self._ended_s = keep * self._ended_s + now_s - began_s

    def rates(self, now_s: float, observed_s: float) -> Amounts:
        """Amounts per second. ``observed_s``: since observing began.

        A turn is in the sums for its own duration and for the memory, so that both together are the span.
        """
        self._fade(now_s)
        total = self._ended + sum((amounts for _, amounts in self._present.values()), np.zeros_like(self._ended))
        rates: Amounts = total / (self._memory.span_s(observed_s) + self._mean_duration_s(now_s))
        return rates

    def _mean_duration_s(self, now_s: float) -> float:
        """Of turns that have ended; those which are there may show that it has grown."""
        ended_s = self._ended_s / self._ended_turns if self._ended_turns > 0 else 0.0
        ages = [now_s - began_s for began_s, _ in self._present.values()]
        return max(ended_s, sum(ages) / len(ages) if ages else 0.0)

    def _fade(self, now_s: float) -> None:
        self._ended *= self._memory.keep(now_s)
