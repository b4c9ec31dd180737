"""Which waiting turns may start: those whose experts fit beside the running ones', a few at a time.

Where the working sets of all turns together exceed the slots, every step copies experts that the next one needs
again. Then it is faster to run some turns after others. And a prefill is a pass over most experts that stops the
running turns, whatever its length: turns that come soon after one another share a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HOLD_TURNS = 8.0
"""A turn that has waited for as long as this many turns usually run starts, whatever it costs the others,"""
MIN_HOLD_S = 2.0
MAX_HOLD_S = 30.0
"""but never before the one nor after the other. Held for less than the running turns take, it would gain nothing:
those that it was kept apart from are still there."""
MAX_GAP_S = 0.5
"""Longest time that turns wait for others to share their pass."""
MAX_SESSIONS = 4096
_TURN_WEIGHT = 0.1

Masks = tuple[int, ...]
"""Experts of a working set, one bit each, in some layers."""


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    """A turn that has not started."""

    session: str
    waited_s: float


class TurnGate:
    """Decides from working sets that it is told. Knows no clock and no engine; times are on any one clock."""

    def __init__(self) -> None:
        """Until it is told working sets, every turn may start at once."""
        self._cap = 0
        self._masks: OrderedDict[str, Masks] = OrderedDict()
        self._pass_s = 0.0
        self._pass_ended_s = 0.0
        self._turn_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether every turn may start: nothing is known."""
        return not self._masks

    def learn(self, cap: int, masks: Mapping[str, Sequence[int]]) -> None:
        """Slots per layer now, and the working sets of some sessions; those of others stay."""
        self._cap = cap
        for session, layers in masks.items():
            self._masks[session] = tuple(layers)
            self._masks.move_to_end(session)
        while len(self._masks) > MAX_SESSIONS:
            self._masks.popitem(last=False)

    def note_pass(self, seconds: float, ended_s: float) -> None:
        """A step that computed prompts took ``seconds``."""
        self._pass_s, self._pass_ended_s = seconds, ended_s

    def note_turn(self, seconds: float) -> None:
        """A turn has run for ``seconds``, its waiting apart."""
        self._turn_s = seconds if self._turn_s is None else self._turn_s + _TURN_WEIGHT * (seconds - self._turn_s)

    @property
    def hold_s(self) -> float:
        """How long a turn waits at most."""
        return min(max(HOLD_TURNS * (self._turn_s or 0.0), MIN_HOLD_S), MAX_HOLD_S)

    def may_start(self, running: Sequence[str], waiting: Sequence[WaitingTurn], now_s: float) -> list[bool]:
        """For each of ``waiting``, in order of arrival, whether it may start beside the sessions ``running``.

        The first one may where nothing runs, and so may turns of sessions that nothing is known about.
        """
        if self.is_open:
            return [True] * len(waiting)
        is_gap = bool(running) and now_s - self._pass_ended_s < min(self._pass_s, MAX_GAP_S)
        union, hold_s = self._union(running), self.hold_s
        decisions: list[bool] = []
        for turn in waiting:
            is_overdue = turn.waited_s >= hold_s
            is_first = not running and not any(decisions)
            with_it = _joined(union, self._masks.get(turn.session))
            may = is_overdue or is_first or (not is_gap and (with_it == union or self._fits(with_it)))
            union = with_it if may else union
            decisions.append(may)
        return decisions

    def _union(self, sessions: Sequence[str]) -> Masks:
        union: Masks = ()
        for session in sessions:
            union = _joined(union, self._masks.get(session))
        return union

    def _fits(self, union: Masks) -> bool:
        return sum(mask.bit_count() for mask in union) <= self._cap * len(union)


def _joined(union: Masks, masks: Masks | None) -> Masks:
    if masks is None or (union and len(union) != len(masks)):
        return union
    return tuple(a | b for a, b in zip(union, masks, strict=True)) if union else masks
