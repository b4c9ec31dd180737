"""Time that expert copies cost: measured, and on CPU optionally charged at an emulated link's speed."""

from __future__ import annotations

import time
from collections.abc import Callable


class Link:
    """Charges copies and pays what is owed by one sleep per forward.

    Without ``bytes_per_s`` it only adds up the measured time. With it, each copy costs ``bytes / bytes_per_s``; the
    real copy's time counts towards it. A copy or a sleep that lasts too long is credited to what follows, up to the
    price of one copy: a link that was idle has not saved anything up.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._owed_s = 0.0
        self._charged_s = 0.0

    def charge(self, num_bytes: int, copy_s: float) -> None:
        """Account for ``num_bytes`` whose real copy took ``copy_s`` seconds."""
        if self.bytes_per_s is None:
            self._charged_s += copy_s
            return
        price_s = num_bytes / self.bytes_per_s
        self._charged_s += max(price_s, copy_s)
        self._owed_s = max(self._owed_s + price_s - copy_s, -price_s)

    def settle(self) -> float:
        """Sleep for what is owed; returns the seconds charged since the last call."""
        if self._owed_s > 0:
            start_s = self._clock()
            self._sleep(self._owed_s)
            self._owed_s -= self._clock() - start_s
        charged_s, self._charged_s = self._charged_s, 0.0
        return charged_s

    def forgive(self) -> None:
        """Drop all charges and debts, as after a forward that does not count."""
        self._owed_s = 0.0
        self._charged_s = 0.0
