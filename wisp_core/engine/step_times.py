"""How long the engine's steps take, all of it: scheduling, the forward, sampling, and the way between processes."""

from __future__ import annotations

from collections import deque


class StepTimes:
    """Adds up the time in which at least one step was under way; idle time is left out.

    A step lasts from its scheduling to the end of its update, or from the end of the step before it where the next
    one is scheduled while it still runs.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._started_s: deque[float] = deque()
        self._last_end_s = 0.0

    def note_start(self, now_s: float) -> None:
        """A step with at least one token is being scheduled."""
        self._started_s.append(now_s)

    def note_end(self, now_s: float) -> float:
        """The output of the oldest open step was taken in; returns the seconds that it took."""
        seconds = max(0.0, now_s - max(self._started_s.popleft(), self._last_end_s))
        self.steps += 1
        self.seconds += seconds
        self._last_end_s = now_s
        return seconds
