"""A circuit breaker: while a server is gone, most calls fail at once and only some pay for finding out."""

from __future__ import annotations

import time


class CircuitBreaker:
    """Opens at a failure; lets one call through per period until one succeeds.

    Not thread-safe: one breaker belongs to one event loop.
    """

    def __init__(self, first_period_s: float = 0.5, max_period_s: float = 2.0) -> None:
        self._first_period_s = first_period_s
        self._max_period_s = max_period_s
        self._period_s = first_period_s
        self._closed_at_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last call that was let through failed."""
        return self._closed_at_s is not None

    def allows(self) -> bool:
        """Whether to try a call now. While open, a True is the one try of this period."""
        if self._closed_at_s is None:
            return True
        now_s = time.monotonic()
        if now_s < self._closed_at_s:
            return False
        self._closed_at_s = now_s + self._period_s
        return True

    def record_success(self) -> None:
        """The server answered."""
        self._closed_at_s = None
        self._period_s = self._first_period_s

    def record_failure(self) -> None:
        """The server did not answer."""
        if self._closed_at_s is not None:
            self._period_s = min(2 * self._period_s, self._max_period_s)
        self._closed_at_s = time.monotonic() + self._period_s
