"""Which page indices of a range one driver mapping covers: a mapping can only be undone whole."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

PageRange = tuple[int, int]
"""Half-open ``[start, stop)`` in pages from the region's start."""


class Mappings:
    """Mappings of 1, 2, 4, ... up to ``longest`` pages, side by side or apart: a physical piece is mapped whole too."""

    def __init__(self, longest: int) -> None:
        """``longest`` is a power of two."""
        self._longest = longest
        self._starts: list[int] = []  # ascending
        self._stop_of: dict[int, int] = {}

    def add(self, start: int, stop: int) -> list[PageRange]:
        """Cover ``[start, stop)``, none of which is covered; returns the new mappings."""
        pieces = []
        at = start
        while at < stop:
            length = min(self._longest, 1 << (stop - at).bit_length() - 1)
            pieces.append((at, at + length))
            at += length
        index = bisect.bisect_left(self._starts, start)
        self._starts[index:index] = [at for at, _ in pieces]
        self._stop_of.update(pieces)
        return pieces

    def remove(self, start: int, stop: int) -> list[PageRange]:
        """Drop every mapping that has a page in ``[start, stop)``, all of which is covered; returns them in order."""
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        dropped = self._starts[first:last]
        del self._starts[first:last]
        return [(at, self._stop_of.pop(at)) for at in dropped]

    def __iter__(self) -> Iterator[PageRange]:
        """All of them, ascending."""
        return ((at, self._stop_of[at]) for at in self._starts)
