"""What the turns in an engine ask of the KV pool: blocks needed in full, the admission floor, means and peaks."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wisp_core.contracts import blocks_of
from wisp_core.working_set.forgetting import Forgetting

_FORGETTING = 0.9
"""Weight of the past in the expected output length, per finished turn."""

_LEAST_SHARE = 1e-3

_NUM_BUCKETS = 20
"""Of a sliding window."""

_UNKNOWN_OUTPUT_TOKENS = 512
"""Expected of a turn as long as none has finished. Chat without a limit may fill the model's length: a few such turns,
taken at their word, would drive the split to the smallest cap. Where they do write more, vLLM preempts."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One unfinished turn; lengths in tokens."""

    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    held_blocks: int = 0


class OutputLengths:
    """Expected output length: a decayed mean over finished turns, of their lengths or of the part of their limit.

    Clients that know how long an answer will be say so, and then a new kind of turn is foretold before one of its kind
    has finished; others send one limit for all. What has foretold the finished turns better is believed.
    """

    def __init__(self) -> None:
        self._means: tuple[float, float] | None = None  # tokens, part of the limit
        self._errors = (0.0, 0.0)

    def observe(self, output_tokens: int, max_output_tokens: int) -> None:
        """Count a finished turn."""
        seen = (float(output_tokens), output_tokens / max(1, max_output_tokens))
        if self._means is None:
            self._means = seen
        foretold = (self._means[0], self._means[1] * max_output_tokens)
        self._errors = _faded(self._errors, (abs(foretold[0] - output_tokens), abs(foretold[1] - output_tokens)))
        self._means = _faded(self._means, seen)

    def expect(self, turn: Turn) -> int:
        """Tokens that ``turn`` will have put out at its end."""
        if self._means is None:
            tokens: float = _UNKNOWN_OUTPUT_TOKENS
        elif self._errors[1] < self._errors[0]:
            tokens = self._means[1] * turn.max_output_tokens
        else:
            tokens = self._means[0]
        return min(turn.max_output_tokens, max(round(tokens), turn.output_tokens + 1))


def _faded(means: tuple[float, float], seen: tuple[float, float]) -> tuple[float, float]:
    return (
        _FORGETTING * means[0] + (1 - _FORGETTING) * seen[0],
        _FORGETTING * means[1] + (1 - _FORGETTING) * seen[1],
    )


class TimeShares:
    """For which share of the time a number was in which range, the time at 0 left out; one weight per range."""

    def __init__(self, edges: Sequence[int], memory_s: float) -> None:
        """``edges`` are the upper ends of the ranges, ascending; above the last one counts as the last."""
        self._edges = list(edges)
        self._memory = Forgetting(memory_s)
        self._weights = np.zeros(len(self._edges))
        self._last_s: float | None = None
        self._place: int | None = None

    def observe(self, now_s: float, value: int) -> None:
        """``value`` holds from now on."""
        self.advance(now_s)
        self._place = min(bisect_left(self._edges, value), len(self._edges) - 1) if value > 0 else None

    def advance(self, now_s: float) -> None:
        """Charge the time since the last call to what held."""
        if self._last_s is not None and self._place is not None and now_s > self._last_s:
            self._weights *= self._memory.keep(now_s)
            self._weights[self._place] += self._memory.span_s(now_s - self._last_s)
        self._last_s = now_s

    def bins(self) -> list[tuple[int, float]]:
        """``(edge, share)`` of the ranges that matter, ascending; shares add up to 1."""
        total = float(self._weights.sum())
        if total <= 0:
            return []
        shares = self._weights / total
        kept = [(edge, share) for edge, share in zip(self._edges, shares.tolist(), strict=True) if share > _LEAST_SHARE]
        return [(edge, share / sum(share for _, share in kept)) for edge, share in kept]


class DemandMeter:
    """Means and peaks over a sliding window of ``window_s`` seconds, kept in buckets."""

    def __init__(self, *, window_s: float, block_tokens: int, max_model_len: int) -> None:
        self.lengths = OutputLengths()
        self._block_tokens = block_tokens
        self._max_model_len = max_model_len
        self._bucket_s = window_s / _NUM_BUCKETS
        self._buckets: deque[_Bucket] = deque()
        self._last_s: float | None = None
        self._turns = 0
        self._demand_blocks = 0

    def full_blocks(self, turn: Turn) -> int:
        """Blocks that ``turn`` needs to run to its expected end."""
        tokens = min(turn.prompt_tokens + self.lengths.expect(turn), self._max_model_len)
        return blocks_of(tokens, self._block_tokens)

    def floor_blocks(self, used_blocks: int, running: Iterable[Turn]) -> int:
        """κ_min without the null block: what is held, counted once where shared, and what running turns still need."""
        return max(blocks_of(self._max_model_len, self._block_tokens), self._needed(used_blocks, running))

    def observe(self, now_s: float, *, used_blocks: int, running: list[Turn], waiting: list[Turn]) -> None:
        """Note the state from now on; call when turns come, start or go."""
        self._advance(now_s)
        self._turns = len(running) + len(waiting)
        self._demand_blocks = self._needed(used_blocks, running) + sum(map(self.full_blocks, waiting))
        self._bucket(now_s).note_peak(self._demand_blocks)

    @property
    def demand_blocks(self) -> int:
        """Blocks that running and waiting turns need in full, as observed last."""
        return self._demand_blocks

    def mean_turns(self, now_s: float) -> float:
        """Mean number of running and waiting turns over the window."""
        self._advance(now_s)
        seconds = sum(bucket.seconds for bucket in self._buckets)
        return sum(bucket.turn_seconds for bucket in self._buckets) / seconds if seconds else float(self._turns)

    def peak_demand_blocks(self, now_s: float) -> int:
        """Most blocks that running and waiting turns needed in full, over the window."""
        self._advance(now_s)
        return max((bucket.peak_blocks for bucket in self._buckets), default=self._demand_blocks)

    def _needed(self, used_blocks: int, running: Iterable[Turn]) -> int:
        return used_blocks + sum(max(0, self.full_blocks(turn) - turn.held_blocks) for turn in running)

    def _advance(self, now_s: float) -> None:
        """Charge the time since the last call to the buckets it lies in, with the state that held."""
        start_s = now_s if self._last_s is None else max(self._last_s, now_s - _NUM_BUCKETS * self._bucket_s)
        while start_s < now_s:
            bucket = self._bucket(start_s)
            stop_s = min(now_s, (bucket.index + 1) * self._bucket_s)
            if stop_s <= start_s:  # rounding at a bucket's edge
                stop_s = now_s
            bucket.charge(stop_s - start_s, self._turns, self._demand_blocks)
            start_s = stop_s
        self._last_s = now_s
        oldest = int(now_s / self._bucket_s) - _NUM_BUCKETS
        while self._buckets and self._buckets[0].index <= oldest:
            self._buckets.popleft()

    def _bucket(self, now_s: float) -> _Bucket:
        index = int(now_s / self._bucket_s)
        if not self._buckets or self._buckets[-1].index < index:
            self._buckets.append(_Bucket(index))
        return self._buckets[-1]


@dataclass
class _Bucket:
    index: int
    seconds: float = 0.0
    turn_seconds: float = 0.0
    peak_blocks: int = 0

    def charge(self, seconds: float, turns: int, demand_blocks: int) -> None:
        self.seconds += seconds
        self.turn_seconds += seconds * turns
        self.note_peak(demand_blocks)

    def note_peak(self, demand_blocks: int) -> None:
        self.peak_blocks = max(self.peak_blocks, demand_blocks)
