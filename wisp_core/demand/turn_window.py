"""What turns ask for, per second: a turn counts in full as long as it is there, and fades once it has ended.

Rates of admissions alone lose sight of turns that last longer than the window, which are the ones that matter most
where the pool is too small; and a phase that begins is known from its first turns, those that still wait among them,
not from their end. That one has ended is known from a silence: where turns of a kind came every second and none has
for five, no more are to be expected, though what they asked for would fade for long: it may be a hundred times what
others ask for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wisp_core.working_set.forgetting import Forgetting

_DURATION_MEMORIES = 4.0
"""Mean durations look back further than the amounts: few turns end within one memory where turns are slow."""

_PHASE_MEMORIES = 4.0
"""How long a kind of turns is taken to be there, in memories, before anything is known of it."""

Amounts = npt.NDArray[np.float64]
"""What one turn asks for, one number each; [amounts]."""


@dataclass
class _Ended:
    """Turns of one kind that have ended, faded to the moment when the last one did."""

    turns: float
    amounts: Amounts
    last_s: float


class TurnWindow:
    """Sums over turns; one that ended ``memory_s`` seconds ago weighs 1/e."""

    def __init__(self, num_amounts: int, memory_s: float) -> None:
        self._memory = Forgetting(memory_s)  # for spans
        self._num_amounts = num_amounts
        self._duration = Forgetting(_DURATION_MEMORIES * memory_s)
        self._present: dict[Hashable, tuple[float, Amounts, Hashable]] = {}
        self._ended: dict[Hashable, _Ended] = {}
        self._ended_turns = 0.0
        self._ended_s = 0.0

    def begin(self, turn: Hashable, amounts: Amounts, now_s: float, kind: Hashable = None) -> None:
        """A turn has come; turns of one ``kind``, as of like length, come and stay away together."""
        self._present.setdefault(turn, (now_s, amounts, kind))

    def revise(self, turn: Hashable, amounts: Amounts) -> None:
        """More is known of a turn that is there, as once it is admitted; of any other nothing changes."""
        if turn in self._present:
            began_s, _, kind = self._present[turn]
            self._present[turn] = (began_s, amounts, kind)

    def learn(self, turn: Hashable, index: int, amount: float) -> None:
        """One of its amounts is known better, while it runs or at its end."""
        if turn in self._present:
            self._present[turn][1][index] = amount

    def forget(self, turn: Hashable) -> None:
        """It has gone without having been admitted, and asks for nothing."""
        self._present.pop(turn, None)

    def end(self, turn: Hashable, now_s: float) -> None:
        """It has ended; one that never began does not count."""
        if turn not in self._present:
            return
        began_s, amounts, kind = self._present.pop(turn)
        ended = self._ended.get(kind, _Ended(0.0, np.zeros(self._num_amounts), now_s))
        kept = self._kept(now_s - ended.last_s)
        self._ended[kind] = _Ended(kept * ended.turns + 1.0, kept * ended.amounts + amounts, now_s)
        keep = self._duration.keep(now_s)
        self._ended_turns = keep * self._ended_turns + 1.0
        self._ended_s = keep * self._ended_s + now_s - began_s

    def rates(self, now_s: float, observed_s: float) -> Amounts:
        """Amounts per second. ``observed_s``: since observing began.

        A turn is in the sums for its own duration and for the memory, so that both together are the span.
        """
        total = np.zeros(self._num_amounts)
        for _, amounts, _ in self._present.values():
            total += amounts
        there = {kind for _, _, kind in self._present.values()}
        for kind, ended in self._ended.items():
            silence_s = max(0.0, now_s - ended.last_s)
            goes_on = 1.0 if kind in there else self._chance_that_more_come(ended.turns, silence_s)
            total += goes_on * self._kept(silence_s) * ended.amounts
        rates: Amounts = total / (self._memory.span_s(observed_s) + self._mean_duration_s(now_s))
        return rates

    def _mean_duration_s(self, now_s: float) -> float:
        """Of turns that have ended; those which are there may show that it has grown."""
        ended_s = self._ended_s / self._ended_turns if self._ended_turns > 0 else 0.0
        ages = [now_s - began_s for began_s, _, _ in self._present.values()]
        return max(ended_s, sum(ages) / len(ages) if ages else 0.0)

    def _kept(self, age_s: float) -> float:
        return math.exp(-max(0.0, age_s) / self._memory.memory_s)

    def _chance_that_more_come(self, turns: float, silence_s: float) -> float:
        """By Bayes: turns that came at random have all stayed away, against their phase having ended meanwhile."""
        per_s = turns / self._memory.memory_s
        by_chance = math.exp(-per_s * silence_s)
        ended = (1.0 - by_chance) / (per_s * _PHASE_MEMORIES * self._memory.memory_s)
        return by_chance / (by_chance + ended) if by_chance > 0 else 0.0
