"""``wisp demo``: starts a service, drives it, shows what happened and checks every token."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from openai import OpenAIError
from rich.console import Console
from rich.markup import escape

from services.app import Service
from services.config import ServiceConfig
from services.demo.connected import first_snapshots, tenant_clients
from services.demo.drive import Driver, Phase
from services.demo.identity import answer_resident, find_mismatches, pick, replay_live
from services.demo.sampler import MemorySampler
from services.demo.summary import Resize, join, print_replica, session_table, show_split
from services.free_port import free_port
from services.preflight import checked_start, own_state_dir
from services.start_progress import progress_to
from wisp_core.contracts import ReplicaSnapshot
from wisp_core.errors import WispError
from wisp_core.store.interface import Store
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

CONFIG_FILE = Path(__file__).parents[2] / "infra" / "serve" / "demo.yaml"
NUM_SAMPLES = 24
_PROGRESS_PERIOD_S = 4.0
_LOG_LENGTH = 200


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The last line on stdout, unless an error ended the demo: then that line has ``ok`` and ``error``."""

    ok: bool
    turns: int
    failed_turns: int
    identity_samples: int
    identity_mismatches: int
    resizes_to_kv: int
    resizes_to_experts: int
    budget_exceeded: int
    serve_seconds: float


def run_demo(*, keep: bool, policy: str, is_swapped: bool) -> int:
    """Run the demo; the exit code is 0 if everything held. The last line on stdout is JSON even if it did not."""
    console = Console(stderr=True)
    try:
        return _run(console, keep=keep, policy=policy, is_swapped=is_swapped)
    except (WispError, OpenAIError) as error:
        console.print(f"[red]wisp demo: {escape(str(error))}")
        typer.echo(json.dumps({"ok": False, "error": str(error)}))
        return 2


def _run(console: Console, *, keep: bool, policy: str, is_swapped: bool) -> int:
    config = prepare_demo(policy)
    # The steps below also end by an exception at SIGTERM, so that nothing is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    console.print(f"starting Valkey, Ray, {config.replica.count} replicas and the policy service ({policy})")
    with checked_start(config), ExitStack() as stack:
        with progress_to(console.print):
            service = stack.enter_context(Service(config))
        console.print(f"ready after {time.monotonic() - started_s:.0f} s at {service.url}")
        demo = Demo(service, console, is_swapped=is_swapped)
        result = asyncio.run(demo.run(started_s))
        if keep:
            typer.echo(json.dumps(asdict(result)))
            _keep(service, console)
    if not keep:
        # After the end of Ray, which writes to stdout when it stops: this line is the last one.
        typer.echo(json.dumps(asdict(result)))
    return 0 if result.ok else 1


def prepare_demo(policy: str) -> ServiceConfig:
    """Write the tiny model; ``infra/serve/demo.yaml`` with a free port and ``policy``. Raises ConfigurationError."""
    config = ServiceConfig.load(CONFIG_FILE)
    # Never under a service that runs there: its replicas read the model again when they restart.
    with own_state_dir(config.state_dir):
        write_tiny_model(Path(config.model.path), TinyModelConfig())
    port = free_port(config.http.host)
    return config.model_copy(
        update={
            "http": config.http.model_copy(update={"port": port}),
            "policy": config.policy.model_copy(update={"name": policy}),
        }
    )


def _keep(service: Service, console: Console) -> None:
    from services.cli.serve import announce, catch_stop_signals

    announce(service)
    console.print("the service stays up until Ctrl-C")
    stopped = catch_stop_signals()
    while not stopped.wait(0.5):
        service.tend()


class Demo:
    """The part that runs against a service that is up."""

    def __init__(self, service: Service, console: Console, *, is_swapped: bool) -> None:
        self._service = service
        self._config = service.config
        self._console = console
        kinds = (Phase.BURSTS, Phase.LONG, Phase.BURSTS)
        swapped = (Phase.LONG, Phase.BURSTS, Phase.LONG)
        self._phases = swapped if is_swapped else kinds

    async def run(self, started_s: float) -> DemoResult:
        """Drive, show and check. The sampler runs from before the first turn until after the last replay."""
        async with AsyncExitStack() as stack:
            store = self._service.store()
            stack.push_async_callback(store.close)
            tending = asyncio.create_task(self._tend())
            stack.callback(tending.cancel)
            clients = await stack.enter_async_context(tenant_clients(self._config, self._service.url))
            driver = Driver(clients, self._config.model.name)
            start = await first_snapshots(store, self._config.replica.count)
            sampler = stack.enter_context(
                MemorySampler(await self._engine_pids(), {one.replica_id: one.budget_bytes for one in start})
            )
            await self._drive(driver, store)
            for error, count in driver.errors.most_common(5):
                self._console.print(f"[red]{count} turns failed: {error}")
            samples = pick(driver.recorded, NUM_SAMPLES)
            self._console.print(f"replaying {len(samples)} prompts on a live replica")
            live = await replay_live(clients, self._config.model.name, samples)
            resizes = await self._show(driver, store, start, sampler)
        self._console.print("replaying them on an engine that holds all experts")
        resident = await asyncio.to_thread(answer_resident, self._config, samples)
        mismatches = find_mismatches(samples, live, resident)
        for line in mismatches:
            self._console.print(f"[red]not identical: {line}")
        applied = [resize for per_replica in resizes.values() for resize in per_replica if resize.is_applied]
        return self._judge(
            driver,
            sampler,
            samples=len(samples),
            mismatches=len(mismatches),
            applied=applied,
            serve_seconds=time.monotonic() - started_s,
        )

    def _judge(
        self,
        driver: Driver,
        sampler: MemorySampler,
        *,
        samples: int,
        mismatches: int,
        applied: Sequence[Resize],
        serve_seconds: float,
    ) -> DemoResult:
        to_kv = sum(resize.is_to_kv for resize in applied)
        to_experts = len(applied) - to_kv
        # A policy that never moves anything is shown not to; any other has to have moved both ways.
        has_moved = not applied if self._config.policy.name == "static_split" else to_kv > 0 and to_experts > 0
        held = driver.num_failed == mismatches == sampler.num_exceeded == 0
        return DemoResult(
            ok=held and has_moved and samples >= NUM_SAMPLES and sampler.num_samples > 0,
            turns=driver.num_turns,
            failed_turns=driver.num_failed,
            identity_samples=samples,
            identity_mismatches=mismatches,
            resizes_to_kv=to_kv,
            resizes_to_experts=to_experts,
            budget_exceeded=sampler.num_exceeded,
            serve_seconds=round(serve_seconds, 1),
        )

    async def _tend(self) -> None:
        while True:
            self._service.tend()
            await asyncio.sleep(0.5)

    async def _engine_pids(self) -> dict[str, list[int]]:
        replicas: list[dict[str, Any]] = await self._service.broadcast("pids")
        return {replica["replica_id"]: replica["engine_pids"] for replica in replicas}

    async def _drive(self, driver: Driver, store: Store) -> None:
        for number, phase in enumerate(self._phases, start=1):
            self._console.print(f"[bold]phase {number} of {len(self._phases)}: {phase.value}")
            progress = asyncio.create_task(self._show_progress(driver, store))
            try:
                await driver.run(phase, f"{number} {phase.value}")
            finally:
                progress.cancel()

    async def _show_progress(self, driver: Driver, store: Store) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_PERIOD_S)
            splits = "; ".join(
                f"{one.replica_id}: {show_split(one.split)}, {one.kv.running_turns} running, "
                f"{one.kv.waiting_turns} waiting"
                for one in await store.list_snapshots()
            )
            self._console.print(f"  {driver.num_turns} turns, {driver.num_failed} failed; {splits}")

    async def _show(
        self, driver: Driver, store: Store, start: Sequence[ReplicaSnapshot], sampler: MemorySampler
    ) -> dict[str, list[Resize]]:
        out = Console()
        placements = await store.read_placements(driver.sessions)
        out.print(session_table(driver.sessions, placements, await store.read_signatures(driver.sessions)))
        ends = {one.replica_id: one.split for one in await store.list_snapshots()}
        resizes: dict[str, list[Resize]] = {}
        for one in start:
            outcomes = await store.list_outcomes(one.replica_id, _LOG_LENGTH)
            decisions = await store.list_decisions(one.replica_id, _LOG_LENGTH)
            resizes[one.replica_id] = join(outcomes, decisions)
            end = ends.get(one.replica_id, one.split)
            print_replica(out, one.replica_id, one.split, end, resizes[one.replica_id], sampler)
        return resizes
