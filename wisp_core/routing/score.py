"""Predicted seconds of a turn on each replica: what it takes there, and what it delays the turns that are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wisp_core.routing.fleet import Fleet
from wisp_core.routing.load import Column, Load, needed_share
from wisp_core.routing.union import least_kept, union_misses, union_misses_above
from wisp_core.routing.views import RoutingRequest, RoutingWeights, Score

_MAX_ROUNDS = 4.0
"""Turns that a turn waits for to end, at most: how many really is not known."""


CAUSES = ("decode_s", "recompute_s", "queue_s", "headroom_s", "resize_s")
"""Fields of `Costs` and of `Score`, in this order."""


@dataclass(frozen=True, eq=False)
class Costs:
    """Predicted seconds of one turn by cause, experts apart, each [N]."""

    decode_s: Column
    recompute_s: Column
    queue_s: Column
    headroom_s: Column
    resize_s: Column

    @property
    def total_s(self) -> Column:
        """The sum."""
        return self.decode_s + self.recompute_s + self.queue_s + self.headroom_s + self.resize_s

    def at(self, positions: npt.NDArray[np.intp], one: int | None = None, own: Costs | None = None) -> Costs:
        """Of some replicas only; at the one at position ``one`` those of ``own`` instead."""
        picked = [getattr(self, cause)[positions] for cause in CAUSES]
        if own is not None:
            is_one = positions == one
            picked = [np.where(is_one, getattr(own, cause), many) for cause, many in zip(CAUSES, picked, strict=True)]
        return Costs(*picked)

    def scores(self, experts_s: Column) -> list[Score]:
        """One for each replica."""
        causes = [getattr(self, cause).tolist() for cause in CAUSES]
        return [Score(*row) for row in zip(experts_s.tolist(), *causes, strict=True)]


def output_tokens(request: RoutingRequest, weights: RoutingWeights) -> int:
    """Decode steps that a turn is taken to need."""
    return min(request.max_tokens or weights.typical_output_tokens, weights.typical_output_tokens)


def costs(request: RoutingRequest, load: Load, *, tokens: int, missing_tokens: float) -> Costs:
    """Everything but the experts.

    Args:
        request: The turn.
        load: Of the replicas asked about.
        tokens: Its `output_tokens`.
        missing_tokens: Prompt tokens that are not in their prefix cache.
    """
    whole = np.floor(missing_tokens / load.max_pass_tokens)
    rest = missing_tokens - whole * load.max_pass_tokens
    passes = whole * load.whole_pass + needed_share(rest, load.use_share)
    # Turns that wait for blocks already come first.
    length = max(1, request.prompt_tokens + request.max_tokens)
    rounds = np.minimum(np.maximum(load.waits - load.free_tokens / length, 0.0), _MAX_ROUNDS)
    return Costs(
        decode_s=tokens * load.token_s,
        recompute_s=passes * load.pass_s + missing_tokens * load.prompt_token_s,
        queue_s=request.mean_turn_s * load.queue,
        headroom_s=request.mean_turn_s * rounds,
        resize_s=load.resize_s,
    )


def costs_at_home(request: RoutingRequest, fleet: Fleet, home: int, tokens: int) -> tuple[Load, Costs]:
    """The home's load without the session itself, and a turn's costs there with what is cached; each [1]."""
    load = fleet.load_without(home, 1.0)
    cached_tokens = float(fleet.column("cached_blocks")[home] * fleet.column("block_tokens")[home])
    missing_tokens = request.prompt_tokens - min(request.prefix_tokens, request.prompt_tokens, cached_tokens)
    return load, costs(request, load, tokens=tokens, missing_tokens=missing_tokens)


def experts_s(request: RoutingRequest, fleet: Fleet, at: npt.NDArray[np.intp], turns: Column, tokens: int) -> Column:
    """Seconds of expert copies on the replicas at positions ``at``, [K], with ``turns`` [K] beside this one.

    A turn whose working set is not known still waits for the copies of those it runs with.
    """
    rates, uses = fleet.rates[at], request.uses
    if rates.shape[1] == 0:
        return np.zeros(len(at))
    is_like = uses is not None and uses.rates.shape == rates.shape[1:]
    own = uses.rates if uses is not None and is_like else np.float32(0.0)
    caps = np.maximum(fleet.column("cap")[at].astype(np.intp), 1)
    # The sessions of a replica count as one at least, though none may run now: their experts are there.
    is_home = at == fleet.position.get(request.home or "", -1)
    counts = np.where(is_home, turns, np.maximum(turns, 1.0)).astype(np.float32)[:, None]
    others = rates * counts[:, :, None]
    least = fleet.least_kept[at] * counts
    if is_like and is_home.any():
        # What its home has seen is in part this session itself: without it the others are left.
        (home,) = np.flatnonzero(is_home)
        others[home] = np.maximum(rates[home] * (counts[home] + 1.0) - own, 0.0)
        least[home] = least_kept(others[home], int(caps[home]))
    after = union_misses(others + own, caps)
    before = union_misses_above(others, caps, least)
    copies = after + turns * np.maximum(after - before, 0.0)
    seconds: Column = (tokens * fleet.scale) * fleet.column("copy_s")[at] * copies
    return seconds
