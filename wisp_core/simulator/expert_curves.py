"""How many experts a decode step misses, by cap, batch and mix of topics: stack distances of replayed routing.

Routing follows a model that the benchmarks use too: a share of a token's experts repeats from the session's token
before, the others are drawn by a Zipf law over the experts, in an order that is partly everybody's and partly the
topic's own. The curves are not assumed: a few layers are replayed through exact LRU stack distances, at a grid of
batches and of topics in the batch, and interpolated in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from wisp_core.simulator.miss_curves import MissCurves
from wisp_core.working_set.miss_curve import misses_by_cap
from wisp_core.working_set.order import recency_keys

FloatArray = npt.NDArray[np.float64]

_SETTLE_TOKENS = 256
_COUNTED_TOKENS = 512
_LEAST_STEPS = 48
_AWAY_STEPS = 48  # of each topic in between, and of the one that comes back
_COMEBACKS = 4
_PROMPT_DOUBLINGS = 10
_MAX_BATCH = 64
_MAX_AWAY = 8
_LEAST_NOISE = 1e-30


@dataclass(frozen=True, kw_only=True)
class RoutingModel:
    """What decides the routing; equal models give equal curves."""

    layers: int
    experts: int
    top_k: int
    repeat: float = 0.46
    """Chance that an expert is used again for the session's next token."""
    zipf_exponent: float = 1.0
    own_share: float = 0.5
    """Weight of the topic's own order of experts against everybody's; 0: topics do not differ."""
    sampled_layers: int = 4
    """Layers that are replayed; the others are taken to be like them."""
    is_read_in_place: bool = True
    """What a step needs beyond the cap is read from host memory once (GPU); else it is cut by rows (CPU)."""
    seed: int = 0

    def preferences(self, num_topics: int, num_layers: int | None = None) -> FloatArray:
        """Weight of each expert for each topic, [topics, layers, E]; rows sum to 1."""
        layers = self.layers if num_layers is None else num_layers
        zipf = 1.0 / np.arange(1, self.experts + 1) ** self.zipf_exponent
        zipf /= zipf.sum()
        shared = np.random.default_rng((self.seed, 4)).permuted(np.tile(zipf, (layers, 1)), axis=-1)
        own = [
            np.random.default_rng((self.seed, 5, topic + 1)).permuted(np.tile(zipf, (layers, 1)), axis=-1)
            for topic in range(num_topics)
        ]
        return (1 - self.own_share) * shared + self.own_share * np.stack(own)

    def use_rates(self, num_topics: int) -> npt.NDArray[np.float32]:
        """Expected uses per decode token of each topic, [topics, layers, E]; each layer sums to top-k."""
        rates = self.preferences(num_topics) * self.top_k
        for _ in range(8):  # an expert is used at most once a token: what is cut off goes to the others
            rates = np.minimum(rates, 1.0)
            rates *= self.top_k / rates.sum(axis=-1, keepdims=True)
        return np.minimum(rates, 1.0).astype(np.float32)


class _Rows:
    """Draws the routed ids of a batch, step by step."""

    def __init__(self, model: RoutingModel, preference: FloatArray, rng: np.random.Generator) -> None:
        """``preference`` [rows, layers, E]."""
        self._model, self._rng = model, rng
        self._preference = preference
        self._is_kept = np.zeros(preference.shape, dtype=np.bool_)

    def next(self) -> npt.NDArray[np.int64]:
        """Ids [rows, layers, top_k], distinct within a token."""
        # The largest of weight / exponential noise are a weighted draw without replacement.
        noise = np.maximum(self._rng.standard_exponential(self._preference.shape), _LEAST_NOISE)
        keys = self._preference / noise
        keys[self._is_kept] = np.inf
        ids = np.argpartition(-keys, self._model.top_k - 1, axis=-1)[..., : self._model.top_k]
        self._is_kept[...] = False
        np.put_along_axis(self._is_kept, ids, self._rng.random(ids.shape) < self._model.repeat, axis=-1)
        return ids


class _Replay:
    """Last use of each expert of the sampled layers, and copies by cap of each step."""

    def __init__(self, model: RoutingModel) -> None:
        self._model = model
        # Slots are never empty for long: at the start every expert was used once, in a random order.
        layers = min(model.layers, model.sampled_layers)
        order = np.tile(np.arange(model.experts, dtype=np.int64), (layers, 1))
        self.last_use = np.random.default_rng((model.seed, 3)).permuted(order, axis=-1)
        self._now = model.experts

    def step(self, ids: npt.NDArray[np.int64]) -> tuple[FloatArray, int]:
        """Copies by cap ``[E + 1]`` and distinct experts, summed over the sampled layers; ``ids`` [rows, layers, k]."""
        layers = np.arange(len(self.last_use))[:, None]
        is_needed = np.zeros(self.last_use.shape, dtype=np.bool_)
        is_needed[layers, ids] = True
        if self._model.is_read_in_place:
            rank = np.empty(self.last_use.shape, dtype=np.int64)
            by_recency = np.argsort(-recency_keys(self.last_use), axis=1)
            np.put_along_axis(rank, by_recency, np.arange(self._model.experts)[None], axis=1)
            counts = np.bincount(rank[is_needed], minlength=self._model.experts + 1)
            copies = np.cumsum(counts[::-1])[::-1].astype(np.float64)
        else:
            of_layers = [misses_by_cap(last_use, ids[:, layer]) for layer, last_use in enumerate(self.last_use)]
            copies = np.sum(of_layers, axis=0).astype(np.float64)
        # Of an expert that several rows use, the last one counts.
        self.last_use[layers, ids] = self._now + np.arange(len(ids))[:, None, None]
        self._now += len(ids)
        return copies, int(np.count_nonzero(is_needed))


class ExpertCurves(MissCurves):
    """Curves that know how many different topics there are, not which; a mix is their number."""

    def __init__(
        self,
        batches: Sequence[int],
        topics: Sequence[int],
        misses: FloatArray,
        distinct: FloatArray,
        away: Sequence[int],
        comeback: FloatArray,
        prompt_misses: FloatArray | None = None,
    ) -> None:
        """Take over what was measured; grids ascend from 1.

        Args:
            batches: sessions in a step.
            topics: different topics among them.
            misses: copies of a step, [batches, topics, E + 1].
            distinct: different experts of a step, [batches, topics].
            away: topics that ran in between.
            comeback: copies beyond the usual that a topic costs when it comes back after them, [away, E + 1].
            prompt_misses: experts of a layer that the first 1, 2, 4, ... tokens of a prompt need and that are not among
                the last used, by how many of those there are, [doublings, E + 1]; None: all experts taken as alike.
        """
        super().__init__(misses.shape[-1] - 1)
        self.batches, self.topics, self.away = tuple(batches), tuple(topics), tuple(away)
        self.misses, self.distinct, self.comeback = misses, distinct, comeback
        self.prompt_misses = prompt_misses
        self._by_mix: dict[tuple[int, int], list[float]] = {}

    def mix(self, topics: Mapping[int, int]) -> int:
        """The number of topics."""
        return len(topics)

    def by_cap(self, batch: int, mix: int) -> list[float]:
        """Copies per step at every cap, for ``batch`` sessions on ``mix`` different topics; [E + 1]."""
        found = self._by_mix.get((batch, mix))
        if found is None:
            found = self._by_mix[batch, mix] = self._interpolated(self.misses, batch, mix).tolist()
        return found

    def distinct_experts(self, batch: int, mix: int) -> float:
        """Different experts of such a step, all layers together."""
        return float(self._interpolated(self.distinct[..., None], batch, mix)[0])

    def distinct_by_batch(self, most: int) -> list[float]:
        """As if every session had a topic of its own."""
        return [self.distinct_experts(batch, batch) for batch in range(1, most + 1)]

    def comeback_by_cap(self, others: int) -> FloatArray:
        """As replayed, between the numbers of topics that were; [E + 1]."""
        if others <= 0:
            return np.zeros(self.num_experts + 1)
        low, high, share = _between(self.away, others)
        between: FloatArray = self.comeback[low] * (1 - share) + self.comeback[high] * share
        return between

    def missed_by_prompt(self, tokens: int, cap: int, top_k: int) -> float:
        """Experts of a layer that ``tokens`` tokens of one prompt need and that ``cap`` slots do not hold.

        Slots hold what was used last, so popular ones: fewer are missed than the share of experts without a slot.
        """
        if self.prompt_misses is None:
            return super().missed_by_prompt(tokens, cap, top_k)
        place = min(math.log2(tokens), len(self.prompt_misses) - 1)
        low = int(place)
        high = min(low + 1, len(self.prompt_misses) - 1)
        here, there = float(self.prompt_misses[low, cap]), float(self.prompt_misses[high, cap])
        return here + (there - here) * (place - low)

    def _interpolated(self, table: FloatArray, batch: int, topics: int) -> FloatArray:
        b_low, b_high, b_share = _between(self.batches, batch)
        t_low, t_high, t_share = _between(self.topics, min(topics, batch))
        low = table[b_low, t_low] * (1 - t_share) + table[b_low, t_high] * t_share
        high = table[b_high, t_low] * (1 - t_share) + table[b_high, t_high] * t_share
        mixed: FloatArray = low * (1 - b_share) + high * b_share
        return mixed


def _between(grid: Sequence[int], value: int) -> tuple[int, int, float]:
    """Neighbours in ``grid`` and how far ``value`` lies between them; beyond the ends, the end."""
    if value <= grid[0]:
        return 0, 0, 0.0
    if value >= grid[-1]:
        return len(grid) - 1, len(grid) - 1, 0.0
    high = next(index for index, point in enumerate(grid) if point >= value)
    share = (value - grid[high - 1]) / (grid[high] - grid[high - 1])
    return high - 1, high, share


@lru_cache(maxsize=16)
def replay_curves(model: RoutingModel, max_batch: int = _MAX_BATCH, max_topics: int = 8) -> ExpertCurves:
    """Replay ``model`` at a grid of batches and topics; a second or two."""
    batches, topics = _powers_of_two(max_batch), _powers_of_two(min(max_topics, max_batch))
    scale = model.layers / min(model.layers, model.sampled_layers)
    misses = np.zeros((len(batches), len(topics), model.experts + 1))
    distinct = np.zeros((len(batches), len(topics)))
    for b_index, batch in enumerate(batches):
        for t_index, num_topics in enumerate(topics):
            if num_topics > batch:
                misses[b_index, t_index], distinct[b_index, t_index] = (
                    misses[b_index, t_index - 1],
                    distinct[b_index, t_index - 1],
                )
            else:
                misses[b_index, t_index], distinct[b_index, t_index] = _steady(model, batch, num_topics)
    away = _powers_of_two(_MAX_AWAY)
    comebacks = _comebacks(model, away) * scale
    return ExpertCurves(batches, topics, misses * scale, distinct * scale, away, comebacks, _prompt_misses(model))


def _powers_of_two(largest: int) -> list[int]:
    return [2**power for power in range(int(math.log2(largest)) + 1)]


def _steady(model: RoutingModel, batch: int, num_topics: int) -> tuple[FloatArray, float]:
    """Mean copies by cap and distinct experts of a step of ``batch`` sessions that go on and on."""
    replay = _Replay(model)
    preferences = model.preferences(num_topics, len(replay.last_use))
    rows = _Rows(model, preferences[np.arange(batch) % num_topics], np.random.default_rng((model.seed, batch, 1)))
    settle_steps = max(_LEAST_STEPS, _SETTLE_TOKENS // batch)
    counted_steps = max(_LEAST_STEPS, _COUNTED_TOKENS // batch)
    copies, distinct = np.zeros(model.experts + 1), 0
    for step in range(settle_steps + counted_steps):
        of_step, num = replay.step(rows.next())
        if step >= settle_steps:
            copies += of_step
            distinct += num
    return copies / counted_steps, distinct / counted_steps


def _prompt_misses(model: RoutingModel) -> FloatArray:
    """Experts of a layer that a prompt's first 1, 2, 4, ... tokens need beyond the last used, by both topics."""
    replay = _Replay(model)
    layers = len(replay.last_use)
    preferences, rng = model.preferences(2, layers), np.random.default_rng((model.seed, 6))
    before = _Rows(model, preferences, rng)
    for _ in range(_SETTLE_TOKENS):
        replay.step(before.next())
    rank = np.empty(replay.last_use.shape, dtype=np.int64)
    by_recency = np.argsort(-recency_keys(replay.last_use), axis=1)
    np.put_along_axis(rank, by_recency, np.arange(model.experts)[None], axis=1)
    rows, misses = _Rows(model, preferences[[1]], rng), []
    is_needed = np.zeros(rank.shape, dtype=np.bool_)
    for token in range(1, 2**_PROMPT_DOUBLINGS + 1):
        np.put_along_axis(is_needed, rows.next()[0], True, axis=1)
        if token & (token - 1) == 0:
            counts = np.bincount(rank[is_needed], minlength=model.experts + 1)
            misses.append(np.cumsum(counts[::-1])[::-1] / layers)
    return np.stack(misses)


def _comebacks(model: RoutingModel, away: Sequence[int]) -> FloatArray:
    """Copies beyond the usual of a session's first steps after sessions of other topics, [away, E + 1]."""
    usual, _ = _steady(model, 1, 1)
    extra = np.array([_first_copies(model, others) for others in away]) - usual * _AWAY_STEPS
    # What is left of a topic only shrinks with every other one that runs; the rest is noise.
    return np.maximum.accumulate(np.maximum(extra, 0.0), axis=0)


def _first_copies(model: RoutingModel, others: int) -> FloatArray:
    """Copies by cap of the first steps of a topic that comes back, mean of a few times."""
    replay = _Replay(model)
    preferences = model.preferences(others + 1, len(replay.last_use))
    rng = np.random.default_rng((model.seed, others, 2))
    copies = np.zeros(model.experts + 1)
    for comeback in range(_COMEBACKS + 1):
        for topic in range(others + 1):
            rows = _Rows(model, preferences[[topic]], rng)
            for _ in range(_AWAY_STEPS):
                of_step, _ = replay.step(rows.next())
                if topic == 0 and comeback > 0:
                    copies += of_step
    return copies / _COMEBACKS
