"""One service for a whole run; its policy is exchanged between the ways that are compared."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from loadtests.bench.online.config import SERVED_NAME, OnlineConfig, service_config
from loadtests.bench.online.drive import Player
from loadtests.bench.online.figures import engine_figures, moves, resize_figures, turn_figures
from loadtests.bench.online.record import recording_of_way
from loadtests.bench.online.workload import fixed_turns
from loadtests.rows import Row
from services.app import Service
from services.config import DampingSettings, PolicySettings
from services.demo.connected import first_snapshots, tenant_clients
from services.preflight import checked_start
from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.errors import WispError
from wisp_core.simulator.recording import Recording, write_recording
from wisp_core.simulator.trace import Trace
from wisp_core.store.interface import Store
from wisp_core.store.keys import TURN_LOG_LENGTH
from wisp_core.tenant_contracts import TurnRecord
from wisp_core.tiny_model.tiny import write_tiny_model

_LOG_LENGTH = 200
_SAMPLE_S = 5.0
_RECORD_SAMPLES = 6
"""Every so many samples the snapshots stay in the recording."""


def trace_of(config: OnlineConfig) -> Trace:
    """The fixed set of turns."""
    return fixed_turns(
        config.workflow,
        num_turns=config.num_turns,
        seed=config.seed,
        max_context_tokens=config.max_context_tokens,
        time_scale=config.time_scale,
        num_topics=config.model.topics,
    )


def run_online(
    config: OnlineConfig,
    directory: Path,
    *,
    say: Callable[[str], None],
    on_rows: Callable[[list[Row]], None],
    record: Path | None = None,
) -> list[Row]:
    """Every way to divide the budget, one after the other on one service; a way that fails is a row with its error.

    ``record``: a directory for a recording of each way, for `wisp simulate replay`.
    """
    write_tiny_model(directory / "model", config.model)
    trace, rows, of_service = trace_of(config), list[Row](), service_config(config, directory)
    with checked_start(of_service), Service(of_service) as service:
        ways: list[int | None] = [*config.caps] + [None] * (config.policy != "none")
        for label, cap in enumerate(ways):
            name = config.policy if cap is None else f"static cap {cap}"
            say(f"{name}: {len(trace)} turns of {trace.num_sessions} sessions")
            service.config = with_policy(service, config, cap)
            service.run_policy()
            way = _Way(config, service, trace, label, cap)
            try:
                row = asyncio.run(way.run())
                if record is not None and row["turns"]:
                    write_recording(record / f"{name.replace(' ', '-')}.jsonl", way.recording())
            except (WispError, TimeoutError) as error:
                row = {"policy": name, "cap": cap, "error": f"{type(error).__name__}: {error}"}
            rows.append(row)
            on_rows(rows)
            say(f"  {_brief(row)}")
            if way.is_interrupted:
                break
    return rows


def with_policy(service: Service, config: OnlineConfig, cap: int | None) -> Any:
    """The service's configuration with the online policy, or with a static split that is taken at once."""
    damping = DampingSettings() if cap is None else DampingSettings(confirmations=1, dead_zone_fraction=0.0)
    settings = PolicySettings(
        name=config.policy if cap is None else "static_split",
        settings={} if cap is None else {"cap": cap},
        epoch_s=config.epoch_s,
        damping=damping,
    )
    return service.config.model_copy(update={"policy": settings})


class _Way:
    """One way to divide the budget, measured over the whole trace."""

    def __init__(self, config: OnlineConfig, service: Service, trace: Trace, label: int, cap: int | None) -> None:
        self._config, self._service, self._trace, self._label, self._cap = config, service, trace, label, cap
        self.is_interrupted = False
        self._timeline: list[Row] = []
        self._player: Player | None = None
        self._snapshots: list[ReplicaSnapshot] = []
        self._records: list[TurnRecord] = []
        self._signatures: list[Signature] = []
        self._started_at_s = 0.0

    def recording(self) -> Recording:
        """What was played and reported, once `run` has ended."""
        assert self._player is not None
        return recording_of_way(
            self._trace,
            self._player.figures,
            self._records,
            self._snapshots,
            started_at_s=self._started_at_s,
            signatures=self._signatures,
        )

    async def run(self) -> Row:
        async with AsyncExitStack() as stack:
            store = self._service.store()
            stack.push_async_callback(store.close)
            tending = asyncio.create_task(self._tend())
            stack.callback(tending.cancel)
            reaching = tenant_clients(self._service.config, self._service.url, timeout_s=self._config.deadline_s)
            clients = await stack.enter_async_context(reaching)
            # A static split is there when all replicas have it; online any split is a start.
            before = await first_snapshots(store, self._config.num_replicas, cap=self._cap)
            self._snapshots = list(before)  # a replay starts from their split
            since_s = self._started_at_s = time.time()
            player = Player(
                self._trace, clients, SERVED_NAME, self._config.model, self._label, self._config.mixed_share
            )
            self._player = player
            sampling = asyncio.create_task(self._sample(store))
            stack.callback(sampling.cancel)
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(self._config.deadline_s):
                    await player.play()
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                self.is_interrupted = True  # what was played until then is a row like that of a run that was cut
            lasted_s = time.monotonic() - started_s
            after = await store.list_snapshots()
            self._snapshots += after  # what replicas count is whole
            records = await store.list_turns(TURN_LOG_LENGTH)
            self._records = [one for one in records if one.at_s >= since_s and not one.is_failed]
            found = await store.read_signatures({one.session_key for one in self._records})
            self._signatures = list(found.values())
            outcomes = [
                outcome
                for one in after
                for outcome in await store.list_outcomes(one.replica_id, _LOG_LENGTH)
                if outcome.at_s >= since_s
            ]
        return {
            "policy": self._config.policy if self._cap is None else "static_split",
            "cap": self._cap,
            **turn_figures(player.figures, self._trace.phases, num_planned=len(self._trace), lasted_s=lasted_s),
            **engine_figures(before, after),
            **resize_figures(outcomes),
            "splits": [asdict_split(one) for one in after],
            "moves": moves(outcomes, since_s),
            "timeline": self._timeline,
        }

    async def _tend(self) -> None:
        while True:
            self._service.tend()
            await asyncio.sleep(0.5)

    async def _sample(self, store: Store) -> None:
        started_s = time.monotonic()
        for number in itertools.count():
            snapshots = await store.list_snapshots()
            if number % _RECORD_SAMPLES == _RECORD_SAMPLES - 1:
                self._snapshots += snapshots
            for one in snapshots:
                self._timeline.append(
                    {
                        "at_s": round(time.monotonic() - started_s, 1),
                        "replica": one.replica_id,
                        **asdict_split(one),
                        "running": one.kv.running_turns,
                        "waiting": one.kv.waiting_turns,
                        "busy": round(one.busy_s_per_s, 3),
                    }
                )
            await asyncio.sleep(_SAMPLE_S)


def asdict_split(snapshot: ReplicaSnapshot) -> Row:
    """The split in effect."""
    return {"cap": snapshot.split.cap, "kv_blocks": snapshot.split.kv_blocks}


def _brief(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    phases: Sequence[Row] = row["phases"]
    by_phase = ", ".join(f"{phase['makespan_s']:.0f}" for phase in phases)
    return (
        f"{row['turns_per_s']:.3f} turns/s, makespan {row['makespan_s']:.0f} s ({by_phase}), "
        f"p95 TTFT {row['ttft_p95_s']:.2f} s, "
        f"{row['failed_turns']} failed, {row['resizes']} resizes"
    )
