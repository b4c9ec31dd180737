"""Whether turns are followed by others: the share of conversations that come back for their prefix.

What is reused says this too, but too late. At the begin of a phase of new conversations nothing comes back yet, and in
a pool that is too small a turn lasts so long that the first return is seen last. So a turn counts only once it is known
what became of it: it was followed, or nobody came for `EXPIRES_S`. Those that still run, or whose client pauses, say
nothing; agents return in one phase as in another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from wisp_core.working_set.forgetting import Forgetting

EXPIRES_S = 120.0
"""A turn that was not followed within this was the last of its conversation: above usual think times."""
_MEMORY_S = 600.0
_MAX_OPEN = 4096
_PRIOR_TURNS = 2.0
_PRIOR_SHARE = 0.5
"""Before anything is known: every second turn is followed, believed like two turns that were seen."""


class Returns:
    """Feed it ends and begins of turns; a conversation is known by any key that its next turn can name."""

    def __init__(self) -> None:
        self._memory = Forgetting(_MEMORY_S)
        self._open: OrderedDict[Hashable, float] = OrderedDict()  # ended at, the oldest first
        self._followed = 0.0
        self._resolved = 0.0

    def begin(self, keys: Iterable[Hashable], now_s: float) -> None:
        """A turn starts that continues the conversation of the first of ``keys`` that is waited for."""
        key = next((key for key in keys if key in self._open), None)
        if key is not None:
            del self._open[key]
            self._resolve(now_s, 1.0)

    def end(self, key: Hashable, now_s: float) -> None:
        """A turn has ended, and ``key`` will name its conversation."""
        self._open.pop(key, None)
        self._open[key] = now_s
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)

    def share(self, now_s: float) -> float:
        """Share of turns that are followed by another one, 0 to 1."""
        while self._open and next(iter(self._open.values())) <= now_s - EXPIRES_S:
            self._open.popitem(last=False)
            self._resolve(now_s, 0.0)
        return (self._followed + _PRIOR_TURNS * _PRIOR_SHARE) / (self._resolved + _PRIOR_TURNS)

    def _resolve(self, now_s: float, followed: float) -> None:
        keep = self._memory.keep(now_s)
        self._followed = keep * self._followed + followed
        self._resolved = keep * self._resolved + 1.0
