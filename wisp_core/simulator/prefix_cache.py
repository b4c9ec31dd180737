"""A replica's KV pool in the simulator: whole sessions instead of single blocks.

A session's prefix is a chain of blocks that are used together, so an LRU list of sessions with their sizes says what
an LRU list of blocks would, in constant time. Of a session that is evicted in part the last blocks go first, as in
vLLM. Blocks that sessions share (a common system prompt) are counted for each.
"""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Blocks held by running turns, and cached blocks of sessions that may come back."""

    __slots__ = ("_sessions", "cached_blocks", "capacity", "running_blocks")

    def __init__(self, capacity: int) -> None:
        """``capacity`` in usable blocks."""
        self.capacity = capacity
        self.running_blocks = 0
        self.cached_blocks = 0
        self._sessions: OrderedDict[int, int] = OrderedDict()  # the one used last at the end

    def can_admit(self, blocks: int) -> bool:
        """Whether a turn of ``blocks`` can run now; cached blocks make room."""
        return self.running_blocks + blocks <= self.capacity

    def admit(self, session: int, blocks: int) -> int:
        """Take ``blocks`` for a turn; returns how many of its session's were still cached."""
        own = self._sessions.pop(session, 0)
        self.cached_blocks -= own
        self.running_blocks += blocks
        self._evict()
        return own

    def finish(self, session: int, held: int, blocks: int) -> None:
        """A turn for which ``held`` were taken ends; its ``blocks`` stay cached."""
        self.running_blocks -= held
        # Another turn of the session may have ended meanwhile: one copy stays.
        self.cached_blocks += blocks - self._sessions.pop(session, 0)
        self._sessions[session] = blocks
        self._evict()

    def resize(self, capacity: int) -> bool:
        """Change the capacity; False, with nothing changed, when running turns hold more."""
        if capacity < self.running_blocks:
            return False
        self.capacity = capacity
        self._evict()
        return True

    def _evict(self) -> None:
        excess = self.running_blocks + self.cached_blocks - self.capacity
        while excess > 0:
            session, blocks = next(iter(self._sessions.items()))
            gone = min(blocks, excess)
            if gone == blocks:
                del self._sessions[session]
            else:
                self._sessions[session] = blocks - gone
            self.cached_blocks -= gone
            excess -= gone
