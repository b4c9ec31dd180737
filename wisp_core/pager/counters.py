"""Running sums behind `wisp_core.contracts.PagerCounts`."""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.contracts import PagerCounts


@dataclass(slots=True)
class ForwardCounter:
    """Forwards of one kind, and their lookups over all layers."""

    steps: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    distinct: int = 0
    seconds: float = 0.0
    link_seconds: float = 0.0

    def look_up(self, distinct: int, hits: int, misses: int) -> None:
        """Count one layer of a forward."""
        self.distinct += distinct
        self.hits += hits
        self.misses += misses

    def add(self, tokens: int, seconds: float, link_seconds: float) -> None:
        """Count one finished forward."""
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        self.link_seconds += link_seconds

    def counts(self, expert_bytes: int) -> PagerCounts:
        """A frozen copy."""
        return PagerCounts(
            steps=self.steps,
            tokens=self.tokens,
            hits=self.hits,
            misses=self.misses,
            missed_bytes=self.misses * expert_bytes,
            distinct=self.distinct,
            seconds=self.seconds,
            link_seconds=self.link_seconds,
        )
