"""Which waiting turns may start: those whose experts fit beside the running ones', a few at a time.

Where the working sets of all turns together exceed the slots, every step copies experts that the next one needs
again. Then it is faster to run some turns after others. And a prefill is a pass over most experts that stops the
running turns, whatever its length: turns that come soon after one another share a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_HOLD_S = 2.0
"""A turn that has waited this long starts, whatever it costs the others."""
MAX_GAP_S = 0.5
"""Longest time that turns wait for others to share their pass."""
MAX_SESSIONS = 4096

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

    def may_start(self, running: Sequence[str], waiting: Sequence[WaitingTurn], now_s: float) -> list[bool]:
        """For each of ``waiting``, in order of arrival, whether it may start beside the sessions ``running``.

        The first one may where nothing runs, and so may turns of sessions that nothing is known about.
        """
        if self.is_open:
            return [True] * len(waiting)
        is_gap = bool(running) and now_s - self._pass_ended_s < min(self._pass_s, MAX_GAP_S)
        union = self._union(running)
        decisions: list[bool] = []
        for turn in waiting:
            is_overdue = turn.waited_s >= MAX_HOLD_S
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
