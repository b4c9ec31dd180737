"""Real engines on this machine's CPU under agent sessions of several topics, with one router after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from loadtests.bench.online.config import MODEL, SERVED_NAME, TENANTS
from loadtests.bench.online.drive import Player
from loadtests.bench.online.figures import TurnFigures, engine_figures, turn_figures
from loadtests.rows import Row, quantile
from loadtests.service.running import service_file, tenant
from loadtests.traces import generate, workflow
from services.app import Service
from services.config import RouterName, ServiceConfig
from services.demo.connected import first_snapshots, tenant_clients
from services.preflight import checked_start
from wisp_core.contracts import ReplicaSnapshot
from wisp_core.simulator.trace import Trace
from wisp_core.tiny_model.tiny import write_tiny_model

_COMPARED = (
    ("decode_missed_bytes_per_token", "miss"),
    ("missed_bytes_per_token", "miss_with_prefill"),
    ("turn_p95_s", "p95_turn"),
    ("turn_mean_s", "mean_turn"),
)


@dataclass(frozen=True, kw_only=True)
class LiveConfig:
    """Service and work; all of it decides the figures."""

    name: str = "placement-cpu"
    routers: tuple[str, ...] = tuple(RouterName)
    works: tuple[str, ...] = ("topics", "shuffled")
    """topics: users have one each. shuffled: every session has one at random."""
    num_replicas: int = 2
    cap: int = 20
    """Expert slots per layer, of 64; a topic prefers 16 experts of each layer."""
    vram_budget_bytes: int = 44_000_000
    activation_bytes: int = 8_388_608
    link_bytes_per_s: float = 100e6
    max_context_tokens: int = 1024
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    workflow: str = "tool_bursts"
    num_turns: int = 104
    agents_scale: float = 1.0
    """Of the workflow's 16 concurrent agents."""
    output_scale: float = 1.5
    time_scale: float = 0.1
    seeds: tuple[int, ...] = (0, 1)
    """Of the work."""


def measure(
    config: LiveConfig, directory: Path, say: Callable[[str], None], on_rows: Callable[[list[Row]], None]
) -> list[Row]:
    """A service for each router, which answers each kind of work of each seed; ``on_rows`` gets what there is so far.

    What routers learn of users goes on from one work to the next, as in a service that lives.
    """
    write_tiny_model(directory / "model", MODEL)
    rows: list[Row] = []
    for router in config.routers:
        of_service = _service_config(config, directory, RouterName(router))
        with checked_start(of_service), Service(of_service) as service:
            for label, (seed, work) in enumerate(product(config.seeds, config.works)):
                row = asyncio.run(_answer(config, service, _trace(config, work, seed), label))
                rows.append({"router": router, "work": work, "seed": seed, **row})
                on_rows(rows)
                per_token = row["decode_missed_bytes_per_token"] / 1e6
                say(f"{router}, {work}, seed {seed}: {per_token:.2f} MB per token, {row['turns']} turns")
    return rows


def summarize(rows: Sequence[Row]) -> Row:
    """WiSP's router over the others: of means over the seeds that both were measured on, and of the worst seed."""
    found = {(row["router"], row["work"], row["seed"]): row for row in rows}
    summary: Row = {}
    for work in dict.fromkeys(row["work"] for row in rows):
        prefix = "" if work == "topics" else f"{work}_"
        for baseline, short in ((RouterName.POWER_OF_TWO, "pow2"), (RouterName.CONSISTENT_HASH, "hash")):
            seeds = sorted({row["seed"] for row in rows})
            keys = [((RouterName.WORKING_SET, work, seed), (baseline, work, seed)) for seed in seeds]
            pairs = [(found[own], found[other]) for own, other in keys if own in found and other in found]
            for key, name in _COMPARED if pairs else ():
                own_mean, other_mean = (
                    float(np.mean([row[key] for row in column])) for column in zip(*pairs, strict=True)
                )
                summary[f"{prefix}{name}_vs_{short}"] = round(own_mean / other_mean, 4)
                worst = max(own[key] / other[key] for own, other in pairs)
                summary[f"{prefix}{name}_vs_{short}_worst_seed"] = round(worst, 4)
    return summary | {"failed_turns": sum(row["failed_turns"] for row in rows)}


async def _answer(config: LiveConfig, service: Service, trace: Trace, label: int) -> Row:
    """Play ``trace``; every turn of a client is sent when the one before has ended."""
    store = service.store()
    try:
        before = await first_snapshots(store, config.num_replicas, cap=config.cap)
        async with tenant_clients(service.config, service.url) as clients:
            player = Player(trace, clients, SERVED_NAME, MODEL, label)
            await player.play()
        await asyncio.sleep(2 * service.config.replica.snapshot_period_s)
        return _figures(trace, player.figures, before, await store.list_snapshots())
    finally:
        await store.close()


def _figures(
    trace: Trace, turns: Sequence[TurnFigures], before: Sequence[ReplicaSnapshot], after: Sequence[ReplicaSnapshot]
) -> Row:
    row = turn_figures(turns, trace.phases, num_planned=len(trace)) | engine_figures(before, after)
    del row["phases"]
    starts = {one.replica_id: one for one in before}
    good = [turn.duration_s for turn in turns if turn.error is None]
    decoded = max(1, row["decode_tokens"])
    return row | {
        "turn_p95_s": quantile(good, 0.95),
        "decode_missed_bytes_per_token": row["decode_missed_bytes"] / decoded,
        "missed_bytes_per_token": (row["decode_missed_bytes"] + row["prefill_missed_bytes"])
        / max(1, row["completion_tokens"]),
        "tokens_by_replica": [one.decode.tokens - starts[one.replica_id].decode.tokens for one in after],
    }


def _trace(config: LiveConfig, work: str, seed: int) -> Trace:
    workload = workflow(
        config.workflow,
        config.num_turns,
        num_topics=MODEL.topics,
        max_context_tokens=config.max_context_tokens,
        agents_scale=config.agents_scale,
        output_scale=config.output_scale,
        time_scale=config.time_scale,
        is_topic_shared=work == "shuffled",
    )
    return generate(workload, seed=seed)


def _service_config(config: LiveConfig, directory: Path, router: RouterName) -> ServiceConfig:
    replica = {
        "count": config.num_replicas,
        "vram_budget_bytes": config.vram_budget_bytes,
        "activation_bytes": config.activation_bytes,
        "initial_cap": config.cap,
        "emulated_link_bytes_per_s": config.link_bytes_per_s,
        "graceful_shutdown_timeout_s": 10,
        "engine": {
            "max_model_len": config.max_context_tokens,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "block_size": 32,
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
        },
    }
    tenants = [tenant(directory, name) for name in TENANTS]
    own = {"state_dir": str(directory / router.value), "routing": {"router": router.value}}
    return ServiceConfig.model_validate(service_file("wisp-placement", directory, SERVED_NAME, replica, tenants, **own))
