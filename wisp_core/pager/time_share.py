"""Keeps a side activity within a share of the time of the work that it watches."""

from __future__ import annotations

_MOST_SAVED_S = 0.05
"""Room is not saved up beyond this: after a long quiet spell not every step may be watched for long."""


class TimeShare:
    """Room of ``fraction`` of the seconds earned. What exceeds it is paid off before there is room again."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._room_s = 0.0

    def has_room(self) -> bool:
        """Whether the activity may run now."""
        return self._room_s >= 0.0

    def earn(self, work_s: float) -> None:
        """The work took ``work_s``."""
        self._room_s = min(self._room_s + self._fraction * work_s, _MOST_SAVED_S)

    def spend(self, seconds: float) -> None:
        """The activity took ``seconds``."""
        self._room_s -= seconds
