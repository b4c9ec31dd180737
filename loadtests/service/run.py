"""One service, one load, one check of every token: what `wisp bench service` does, on a GPU or on a CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.rows import Row
from loadtests.service.gpu_memory import GpuProcesses, wait_until_gone
from services.app import Service
from services.cli.load import Counters, run_locust
from services.cli.operator import Operator
from services.config import ServiceConfig
from services.demo.connected import first_snapshots, tenant_clients
from services.demo.identity import Answer, RecordedTurn, answer_resident, find_mismatches, replay_live
from services.demo.sampler import MemorySampler
from services.demo.workload import Agent, AgentSpec
from services.preflight import checked_start
from wisp_core.contracts import Outcome, ReplicaSnapshot, ResizeOutcome

_LOG_LENGTH = 500
_RESTART_TIMEOUT_S = 240.0
_LONG_WORDS = (40, 160, 600, 1500)


@dataclass(frozen=True, kw_only=True)
class ServiceRun:
    """What to do with the service."""

    users: int = 8
    run_time: str = "5m"
    num_samples: int = 24
    phase_s: float = 0.0
    """Length of the phases in which all sessions do the same, bursts first; 0: no phases."""
    long_words: int = 1500
    """Of a long document."""
    is_engine_killed: bool = True
    """Kill one replica's engine after the load and time until it serves again."""


@dataclass(kw_only=True)
class Found:
    """What a run has found."""

    rows: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def run_service(config: ServiceConfig, run: ServiceRun) -> Found:
    """Start the service, load it, kill an engine, replay prompts, stop it, and ask an engine with all experts.

    Raises ConfigurationError when the service does not start.
    """
    found = Found()
    started_s = time.monotonic()
    samples = sample_turns([tenant.tenant_id for tenant in config.tenants], run.num_samples)
    copies_before = host_copies(config)
    with checked_start(config), Service(config) as service:
        found.summary["ready_s"] = time.monotonic() - started_s
        live, pids = asyncio.run(_Watch(service, run, found).run(samples))
    if config.replica.num_gpus:
        found.summary["is_device_memory_returned"] = wait_until_gone(pids)
    resident = answer_resident(config, samples)
    mismatches = find_mismatches(samples, live, resident)
    found.summary |= {
        "identity_samples": len(samples),
        "identity_mismatches": len(mismatches),
        "identity_first_mismatches": mismatches[:3],
        "identity_tokens": sum(map(len, resident)),
        "host_copies": [_size_bytes(copy) for copy in sorted(host_copies(config) - copies_before)],
    }
    return found


def sample_turns(tenants: Sequence[str], num_samples: int) -> list[RecordedTurn]:
    """Turns of agents of every tenant: short ones that offer a tool, and contexts of growing length."""
    turns = []
    for number in range(num_samples):
        tenant = tenants[number % len(tenants)]
        spec = AgentSpec(tenant=tenant, user="replay", session_id=f"replay-{number}", topic=number % 8)
        agent = Agent(spec, task=number)
        is_long = number % 2 == 1
        turn = agent.long_turn(_LONG_WORDS[number // 2 % len(_LONG_WORDS)]) if is_long else agent.burst_turn()
        turns.append(RecordedTurn("long" if is_long else "burst", tenant, turn))
    return turns


class _Watch:
    """The part that runs against a service that is up."""

    def __init__(self, service: Service, run: ServiceRun, found: Found) -> None:
        self._service, self._config, self._run, self._found = service, service.config, run, found

    async def run(self, samples: Sequence[RecordedTurn]) -> tuple[list[Answer], list[int]]:
        """Answers of a live replica to ``samples``, and the processes of all engines that ran."""
        async with AsyncExitStack() as stack:
            clients = await stack.enter_async_context(tenant_clients(self._config, self._service.url))
            store = self._service.store()
            stack.push_async_callback(store.close)
            pids = await self._pids()
            snapshots = await first_snapshots(store, self._config.replica.count)
            sampler = stack.enter_context(self._sampler(pids, snapshots))
            await self._load(store)
            live = await replay_live(clients, self._config.model.name, samples)
            all_pids = [pid for of_replica in pids.values() for pid in of_replica]
            if self._run.is_engine_killed:
                await self._kill_an_engine(sampler, pids)
                all_pids += [pid for of_replica in (await self._pids()).values() for pid in of_replica]
            self._found.rows += _memory_rows(sampler)
        self._found.summary["budget_exceeded"] = sum(
            row["num_exceeded"] for row in self._found.rows if row["row"] == "memory"
        )
        return live, all_pids

    async def _load(self, store: Any) -> None:
        service = await asyncio.to_thread(Operator, self._config.state_dir)
        before = Counters.read(service)
        work = ["--wisp-phase-s", str(self._run.phase_s), "--wisp-long-words", str(self._run.long_words)]
        code, rows = await asyncio.to_thread(run_locust, service.facts, self._run.users, self._run.run_time, work)
        after = Counters.read(service)
        self._found.rows += [_locust_row(row) for row in rows if row["Name"] != "Aggregated"]
        self._found.rows += [await self._replica_row(store, one) for one in await store.list_snapshots()]
        self._found.summary |= {
            "locust_exit_code": code,
            **turn_counts(rows),
            "prompt_tokens": after.since(before, "vllm:prompt_tokens_total"),
            "generated_tokens": after.since(before, "vllm:generation_tokens_total"),
            "prefix_hit_tokens": after.since(before, "vllm:prefix_cache_hits_total"),
            "expert_bytes_copied": after.since(before, "wisp_replica_expert_copied_bytes_total"),
            "preemptions": after.since(before, "vllm:num_preemptions_total"),
            "resizes_to_experts": self._sum_of_replicas("resizes_to_experts"),
            "resizes_to_kv": self._sum_of_replicas("resizes_to_kv"),
        }

    def _sum_of_replicas(self, figure: str) -> int:
        return sum(row[figure] for row in self._found.rows if row["row"] == "replica")

    async def _replica_row(self, store: Any, one: ReplicaSnapshot) -> Row:
        outcomes: list[ResizeOutcome] = await store.list_outcomes(one.replica_id, _LOG_LENGTH)
        applied = [outcome for outcome in outcomes if outcome.outcome is Outcome.APPLIED and outcome.bytes_moved]
        return {
            "row": "replica",
            "replica": one.replica_id,
            "cap": one.split.cap,
            "kv_blocks": one.split.kv_blocks,
            "is_paged": one.layout.is_paged,
            "decode_steps": one.decode.steps,
            "decode_tokens": one.decode.tokens,
            "prefill_steps": one.prefill.steps,
            "missed_bytes_per_decode_step": one.decode.missed_bytes / one.decode.steps if one.decode.steps else 0.0,
            "decode_hit_rate": one.decode.hits / one.decode.distinct if one.decode.distinct else None,
            "ms_per_decode_step": one.decode.seconds / one.decode.steps * 1e3 if one.decode.steps else None,
            "link_bytes_per_s": one.link_bytes_per_s,
            "is_link_emulated": one.is_link_emulated,
            "resizes_to_experts": sum(outcome.after.cap > outcome.before.cap for outcome in applied),
            "resizes_to_kv": sum(outcome.after.cap < outcome.before.cap for outcome in applied),
            "max_pause_ms": max((outcome.pause_ms for outcome in applied), default=None),
            "outcomes": {kind.value: sum(one.outcome is kind for one in outcomes) for kind in Outcome},
        }

    async def _kill_an_engine(self, sampler: Any, pids: Mapping[str, Sequence[int]]) -> None:
        """Kill one engine, and wait until its replica has started another one, attached to the host's copy."""
        victim = sorted(pids)[0]
        started_s = time.monotonic()
        os.kill(pids[victim][0], signal.SIGKILL)
        while time.monotonic() - started_s < _RESTART_TIMEOUT_S:
            await asyncio.sleep(0.5)
            health = {one["replica_id"]: one["is_healthy"] for one in await self._service.broadcast("health")}
            now = await self._pids()
            engine = set(now[victim][:-1])
            if health.get(victim) and engine and engine.isdisjoint(pids[victim]):
                break
        else:
            raise RuntimeError(f"{victim} did not serve again within {_RESTART_TIMEOUT_S:g} s")
        self._found.summary["engine_restart_s"] = time.monotonic() - started_s
        if isinstance(sampler, GpuProcesses):
            sampler.follow(now)
            await asyncio.sleep(2)

    async def _pids(self) -> dict[str, list[int]]:
        replicas: list[dict[str, Any]] = await self._service.broadcast("pids")
        # The replica's own process comes last: it stays when its engine is started again.
        return {one["replica_id"]: [*one["engine_pids"], one["pid"]] for one in replicas}

    def _sampler(
        self, pids: Mapping[str, Sequence[int]], snapshots: Sequence[ReplicaSnapshot]
    ) -> AbstractContextManager[Any]:
        if self._config.replica.num_gpus:
            return GpuProcesses(pids, self._config.replica.vram_budget_bytes)
        # Actors hold none of the pools, so only the engines' mappings are read.
        engines = {replica_id: of_replica[:-1] for replica_id, of_replica in pids.items()}
        return MemorySampler(engines, {one.replica_id: one.budget_bytes for one in snapshots})


def _memory_rows(sampler: Any) -> list[Row]:
    if isinstance(sampler, GpuProcesses):
        return [
            {
                "row": "memory",
                "replica": replica_id,
                "source": sampler.source,
                "budget_bytes": one.budget_bytes,
                "peak_bytes": one.peak_bytes,
                "num_samples": one.num_samples,
                "num_exceeded": one.num_exceeded,
            }
            for replica_id, one in sampler.replicas.items()
        ]
    return [
        {
            "row": "memory",
            "replica": "all",
            "source": "Rss of both pools' mappings in smaps",
            "num_samples": sampler.num_samples,
            "num_exceeded": sampler.num_exceeded,
        }
    ]


def turn_counts(rows: Sequence[Mapping[str, str]]) -> Row:
    """Turns of Locust's rows, and those that failed; TTFTs have rows of their own."""
    turns = [row for row in rows if row["Type"] == "POST"]
    return {
        "requests": sum(int(row["Request Count"]) for row in turns),
        "failures": sum(int(row["Failure Count"]) for row in turns),
    }


def _locust_row(row: Mapping[str, str]) -> Row:
    return {
        "row": "clients",
        "name": f"{row['Type']} {row['Name']}".strip(),
        "requests": int(row["Request Count"]),
        "failures": int(row["Failure Count"]),
        "median_ms": float(row["50%"] or 0),
        "p95_ms": float(row["95%"] or 0),
        "per_s": float(row["Requests/s"]),
    }


def host_copies(config: ServiceConfig) -> set[Path]:
    """The copies of experts that lie in the host's store now."""
    directory = config.replica.host_store_dir
    return set() if directory is None else set(Path(directory).glob("wisp-experts-*"))


def _size_bytes(copy: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in copy.iterdir())
