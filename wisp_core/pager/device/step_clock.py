"""Device time of forwards by kind, from events that are read once they have passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class StepClock:
    """Adds up the time between `start` and `stop` without waiting for the device."""

    def __init__(self) -> None:
        self._pending: deque[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._started: tuple[bool, torch.cuda.Event] | None = None
        self._seconds = {False: 0.0, True: 0.0}

    def start(self, *, is_prefill: bool) -> None:
        """A forward's launches follow."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._started = (is_prefill, event)

    def stop(self) -> None:
        """The forward's launches are made."""
        if self._started is None:
            return
        is_prefill, started = self._started
        stopped = torch.cuda.Event(enable_timing=True)
        stopped.record()
        self._pending.append((is_prefill, started, stopped))
        self._started = None
        self._collect()

    def seconds(self, *, is_prefill: bool) -> float:
        """Device seconds of the finished forwards of one kind."""
        self._collect()
        return self._seconds[is_prefill]

    def mark(self) -> Callable[[], dict[bool, float]]:
        """This point of the stream: the seconds by ``is_prefill`` up to here, to be asked for once it has passed."""
        self._collect()
        seconds, pending = dict(self._seconds), list(self._pending)

        def read() -> dict[bool, float]:
            for is_prefill, started, stopped in pending:
                stopped.synchronize()  # it has passed, or the caller asks too early
                seconds[is_prefill] += started.elapsed_time(stopped) / 1e3
            pending.clear()
            return seconds

        return read

    def reset(self) -> None:
        """Forget all forwards."""
        self._pending.clear()
        self._started = None
        self._seconds = {False: 0.0, True: 0.0}

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            is_prefill, started, stopped = self._pending.popleft()
            self._seconds[is_prefill] += started.elapsed_time(stopped) / 1e3
