"""How fast the simulator is: turns per second of one core, from one replica to ten thousand."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from loadtests.simulate.engines import build_engine
from loadtests.traces import open_sessions, workflow
from wisp_core.simulator.routers import HashRouter, PowerOfTwoRouter, Router, ScoredRouter, StickyLeastTurnsRouter
from wisp_core.simulator.simulation import simulate

ROUTERS: dict[str, Callable[[], Router]] = {
    "scored": ScoredRouter,
    "hash": HashRouter,
    "power_of_two": PowerOfTwoRouter,
    "sticky_least_turns": StickyLeastTurnsRouter,
}


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """What is run: replicas, turns and router of each run."""

    name: str = "simulate-scale"
    shape: str = "qwen3-30b-a3b"
    card: str = "rtx-4090"
    budget_gb: float = 24.0
    workflow: str = "tool_bursts"
    turns_per_s_and_replica: float = 0.15
    runs: tuple[tuple[int, int, str], ...] = (
        (1, 100_000, "hash"),
        (100, 1_000_000, "hash"),
        (1_000, 100_000, "scored"),
        (10_000, 1_000_000, "hash"),
    )
    seed: int = 0


def scale(config: ScaleConfig, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each run."""
    engine, routing = build_engine(
        shape=config.shape,
        card=config.card,
        budget_gb=config.budget_gb,
        max_model_len=32768,
        max_num_seqs=32,
        chunk_tokens=2048,
    )
    for replicas, turns, router in config.runs:
        say(f"{turns} turns on {replicas} replicas, router {router}")
        work = workflow(config.workflow, turns, num_topics=8)
        started_s = time.perf_counter()
        trace = open_sessions(work, sessions_per_s=replicas * config.turns_per_s_and_replica / 14, seed=config.seed)
        generated_s = time.perf_counter() - started_s
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        result = simulate(
            trace,
            engine,
            num_replicas=replicas,
            router=ROUTERS[router](),
            routing=routing if router == "scored" else None,
        )
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        yield {
            "replicas": replicas,
            "turns": len(trace),
            "sessions": trace.num_sessions,
            "router": router,
            "generate_s": generated_s,
            "simulate_s": seconds,
            "simulate_cpu_s": cpu_s,
            "cpu_us_per_turn": 1e6 * cpu_s / len(trace),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "simulated_s": result.makespan_s,
            "mean_turn_s": result.mean_turn_s,
            "busy_share": result.summary()["busy_share"],
        }
