"""How long the router takes to decide, and what its shortcuts cost against scoring every replica in full."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from loadtests.rows import Row
from wisp_core.routing.fleet import Fleet
from wisp_core.routing.route import route
from wisp_core.routing.views import ReplicaFigures, RoutingRequest, RoutingWeights, Uses

Rates = npt.NDArray[np.float32]

NOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DecisionsConfig:
    """A fleet of the 30B shape on 24 GB cards, and its sessions."""

    name: str = "routing-decision"
    num_replicas: int = 1000
    num_sessions: int = 100_000
    num_layers: int = 48
    num_experts: int = 128
    top_k: int = 8
    cap: int = 32
    num_topics: int = 64
    zipf_exponent: float = 1.2
    decisions: int = 5000
    """Of each kind that are timed."""
    regret_samples: int = 300
    seed: int = 0


class _World:
    """Seeded replicas and sessions; a session's working set is its topic's with deviations of its own."""

    def __init__(self, config: DecisionsConfig) -> None:
        self.config = config
        self._rng = np.random.default_rng(config.seed)
        ranks = 1.0 / np.arange(1, config.num_experts + 1) ** config.zipf_exponent
        shape = (config.num_topics, config.num_layers, 1)
        self._liking: npt.NDArray[np.float64] = self._rng.permuted(np.tile(ranks, shape), axis=-1)
        self.figures = [self._figures() for _ in range(config.num_replicas)]
        self.rates = [self._mixed() for _ in range(config.num_replicas)]

    def session(self, number: int) -> Rates:
        """Use rates of a session."""
        rng = np.random.default_rng((self.config.seed, number))
        liking = self._liking[rng.integers(self.config.num_topics)] * rng.lognormal(0, 0.3, self._liking.shape[1:])
        shares = liking / liking.sum(axis=1, keepdims=True)
        rates: Rates = np.minimum(shares * self.config.top_k, 1.0).astype(np.float32)
        return rates

    def fleet(self, weights: RoutingWeights, max_layers: int | None = None) -> Fleet:
        """All replicas as a router knows them."""
        fleet = Fleet(weights) if max_layers is None else Fleet(weights, max_layers)
        for number, (figures, rates) in enumerate(zip(self.figures, self.rates, strict=True)):
            fleet.update(replica_name(number), figures)
            fleet.set_rates(replica_name(number), rates)
        return fleet

    def _mixed(self) -> Rates:
        sessions = self._rng.integers(self.config.num_sessions, size=self._rng.integers(1, 5))
        mixed: Rates = np.mean([self.session(int(number)) for number in sessions], axis=0)
        return mixed

    def _figures(self) -> ReplicaFigures:
        rng = self._rng
        return ReplicaFigures(
            at_s=0.0,
            is_healthy=float(rng.random() > 0.01),
            is_draining=float(rng.random() < 0.01),
            is_resizing=float(rng.random() < 0.01),
            cap=float(self.config.cap),
            copy_s=9.4e6 / 25e9,
            fixed_s=0.0036,
            row_s=0.00066,
            pass_s=1.0,
            pass_tokens=2048.0,
            max_pass_tokens=2048.0,
            use_share=self.config.top_k / self.config.num_experts,
            prompt_token_s=4e-5,
            prefill_share=float(rng.random() * 0.3),
            block_tokens=16.0,
            kv_blocks=4000.0,
            free_blocks=float(rng.integers(0, 4000)),
            cached_blocks=1000.0,
            max_num_seqs=32.0,
            turns=float(rng.integers(0, 12)),
            waiting_turns=0.0,
            mean_turns=float(rng.random() * 10),
            window_s=10.0,
        )


def replica_name(number: int) -> str:
    """Ids as Serve makes them."""
    return f"wisp#Replica#{number:08x}"


def measure(config: DecisionsConfig, say: Callable[[str], None]) -> list[Row]:
    """Times of unplaced and of placed sessions, and the regret of the former."""
    say(f"{config.num_replicas} replicas, {config.num_sessions} sessions")
    world = _World(config)
    fleet = world.fleet(RoutingWeights())
    homes = {n: replica_name(n % config.num_replicas) for n in range(config.num_sessions)}
    timed = np.random.default_rng(config.seed).integers(config.num_sessions, size=config.decisions).tolist()
    rows = [
        {"kind": "unplaced", **_times(world, fleet, timed, {})},
        {"kind": "placed", **_times(world, fleet, timed, homes)},
    ]
    say("regret")
    return [*rows, {"kind": "regret", **_regret(world, fleet, timed[: config.regret_samples])}]


def summarize(rows: list[Row]) -> Row:
    """The figures that count."""
    by_kind = {row["kind"]: row for row in rows}
    return {
        "decision_p50_us": by_kind["unplaced"]["p50_us"],
        "decision_p99_us": by_kind["unplaced"]["p99_us"],
        "decision_cpu_p50_us": by_kind["unplaced"]["cpu_p50_us"],
        "decision_cpu_p99_us": by_kind["unplaced"]["cpu_p99_us"],
        "placed_p50_us": by_kind["placed"]["p50_us"],
        "placed_p99_us": by_kind["placed"]["p99_us"],
        "regret_mean": by_kind["regret"]["mean"],
        "regret_p95": by_kind["regret"]["p95"],
        "regret_max": by_kind["regret"]["max"],
    }


def _request(world: _World, session: int, home: str | None, max_layers: int | None = None) -> RoutingRequest:
    rates = world.session(session)
    return RoutingRequest(
        session_key=f"tenant/user/{session}",
        prompt_tokens=2000,
        max_tokens=200,
        home=home,
        prefix_tokens=1800 if home else 0,
        uses=Uses.of(rates) if max_layers is None else Uses.of(rates, max_layers),
    )


def _times(world: _World, fleet: Fleet, sessions: list[int], homes: dict[int, str]) -> Row:
    """Wall and CPU time of decisions, each followed by the turn's start and end as in a router."""
    wall_us, cpu_us = [], []
    requests = [_request(world, session, homes.get(session)) for session in sessions]
    for request in requests:
        assert request.uses is not None
        _ = request.uses.sketch  # Made when a working set is read, not in the decision.
    for request in requests:
        cpu_began_s, began_s = time.thread_time(), time.perf_counter()
        decision = route(request, fleet, NOW_S)
        wall_us.append((time.perf_counter() - began_s) * 1e6)
        cpu_us.append((time.thread_time() - cpu_began_s) * 1e6)
        fleet.add_turns(decision.chosen, 1)
        fleet.add_turns(decision.chosen, -1)
    return {
        "decisions": len(wall_us),
        **{f"p{p}_us": round(float(np.percentile(wall_us, p)), 1) for p in (5, 50, 99)},
        **{f"cpu_p{p}_us": round(float(np.percentile(cpu_us, p)), 1) for p in (5, 50, 99)},
    }


def _regret(world: _World, fleet: Fleet, sessions: list[int]) -> Row:
    """Predicted seconds on the chosen replica over those on the best one, all layers of all replicas scored."""
    config = world.config
    every = replace(RoutingWeights(), num_scored=config.num_replicas)
    full = world.fleet(every, max_layers=config.num_layers)
    regrets = []
    for session in sessions:
        chosen = route(_request(world, session, None), fleet, NOW_S).chosen
        best = route(_request(world, session, None, config.num_layers), full, NOW_S)
        regrets.append(best.scores[chosen].total_s / best.scores[best.chosen].total_s - 1.0)
    return {
        "samples": len(regrets),
        "mean": round(float(np.mean(regrets)), 5),
        "p95": round(float(np.percentile(regrets, 95)), 5),
        "max": round(float(np.max(regrets)), 5),
    }
