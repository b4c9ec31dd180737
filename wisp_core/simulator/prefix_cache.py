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


class WeightedStack:
    """Stack distances of sessions in blocks: how much was used since a session was, in O(log n)."""

    __slots__ = ("_next_slot", "_slot_of", "_tree", "_weight_of")

    def __init__(self, num_slots: int = 256) -> None:
        self._slot_of: dict[int, int] = {}  # in order of last use
        self._weight_of: dict[int, int] = {}
        self._tree = [0] * (num_slots + 1)  # Fenwick tree of weights by slot
        self._next_slot = 1

    def blocks_since(self, session: int) -> int | None:
        """Blocks of the other sessions used since ``session`` was; None when it never was."""
        slot = self._slot_of.get(session)
        if slot is None:
            return None
        return self._sum_to(self._next_slot - 1) - self._sum_to(slot)

    def touch(self, session: int, blocks: int) -> None:
        """Make ``session``, of ``blocks`` blocks, the one used last."""
        slot = self._slot_of.pop(session, None)
        if slot is not None:
            self._add(slot, -self._weight_of[session])
        if self._next_slot == len(self._tree):
            self._renumber()
        self._slot_of[session] = self._next_slot
        self._weight_of[session] = blocks
        self._add(self._next_slot, blocks)
        self._next_slot += 1

    def _renumber(self) -> None:
        size = max(len(self._tree) - 1, 2 * len(self._slot_of) + 2)
        self._tree = [0] * (size + 1)
        for slot, session in enumerate(self._slot_of, start=1):
            self._slot_of[session] = slot
            self._add(slot, self._weight_of[session])
        self._next_slot = len(self._slot_of) + 1

    def _add(self, slot: int, change: int) -> None:
        tree, size = self._tree, len(self._tree)
        while slot < size:
            tree[slot] += change
            slot += slot & -slot

    def _sum_to(self, slot: int) -> int:
        tree, total = self._tree, 0
        while slot > 0:
            total += tree[slot]
            slot -= slot & -slot
        return total
