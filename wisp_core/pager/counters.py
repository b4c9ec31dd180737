"""Running sums behind `wisp_core.contracts.PagerCounts`."""

from __future__ import annotations

from dataclasses import dataclass, field

from wisp_core.contracts import PagerCounts


@dataclass(slots=True)
class LayerCounter:
    """Lookups of one layer in one kind of forward."""

    steps: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    distinct: int = 0

    def add(self, tokens: int, distinct: int, hits: int, misses: int) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.distinct += distinct
        self.hits += hits
        self.misses += misses

    def counts(self, expert_bytes: int) -> PagerCounts:
        """A frozen copy; times are known per forward only and stay 0."""
        return PagerCounts(
            steps=self.steps,
            tokens=self.tokens,
            hits=self.hits,
            misses=self.misses,
            missed_bytes=self.misses * expert_bytes,
            distinct=self.distinct,
        )


@dataclass(slots=True)
class ForwardCounter:
    """Forwards of one kind over all layers."""

    num_layers: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    link_seconds: float = 0.0
    layers: list[LayerCounter] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [LayerCounter() for _ in range(self.num_layers)]

    def add(self, tokens: int, seconds: float, link_seconds: float) -> None:
        """Count one finished forward."""
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        self.link_seconds += link_seconds

    def counts(self, expert_bytes: int) -> PagerCounts:
        """A frozen copy, lookups summed over layers."""
        misses = sum(layer.misses for layer in self.layers)
        return PagerCounts(
            steps=self.steps,
            tokens=self.tokens,
            hits=sum(layer.hits for layer in self.layers),
            misses=misses,
            missed_bytes=misses * expert_bytes,
            distinct=sum(layer.distinct for layer in self.layers),
            seconds=self.seconds,
            link_seconds=self.link_seconds,
        )
