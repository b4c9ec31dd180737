"""``wisp trace record``: follow a running service for a while and keep its workload as numbers."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from services.cli.operator import Operator
from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.simulator.recording import Recording, recording_of, write_recording
from wisp_core.tenant_contracts import TurnRecord

_PATH = "/wisp/recording"
_PERIOD_S = 1.0
_MAX_TURNS = 10_000


def record_trace(output: Path, duration_s: float, state_dir: Path) -> None:
    """Record for ``duration_s`` seconds and write ``output``. Raises ConfigurationError when no turn ended."""
    service = Operator(state_dir)
    started_s = time.time()
    typer.echo(f"wisp: recording {service.url} for {duration_s:g} s", err=True)
    recording = collect(service, duration_s, started_s)
    write_recording(output, recording)
    trace = recording.trace
    typer.echo(
        f"{output}: {len(trace)} turns of {trace.num_sessions} sessions, {len(recording.snapshots)} snapshots, "
        f"{len(recording.signatures)} signatures"
    )


def collect(service: Operator, duration_s: float, started_s: float) -> Recording:
    """Watch ``service``; the turns are those that ended since ``started_s``, Unix seconds."""
    snapshots: dict[tuple[str, float], ReplicaSnapshot] = {}
    with suppress(KeyboardInterrupt):
        while (left_s := started_s + duration_s - time.time()) > 0:
            _keep(snapshots, service.read(_PATH, turns=0).json())
            time.sleep(min(_PERIOD_S, left_s))
    last = service.read(_PATH, turns=_MAX_TURNS).json()
    _keep(snapshots, last)
    turns = [TurnRecord.model_validate(turn) for turn in last["turns"]]
    return recording_of(
        (turn for turn in turns if turn.at_s >= started_s),
        source=f"recorded from {service.url}",
        snapshots=(snapshots[key] for key in sorted(snapshots, key=lambda key: key[1])),
        signatures=(Signature.model_validate(one) for one in last["signatures"]),
    )


def _keep(snapshots: dict[tuple[str, float], ReplicaSnapshot], answer: dict[str, Any]) -> None:
    for one in answer["snapshots"]:
        snapshot = ReplicaSnapshot.model_validate(one)
        snapshots[snapshot.replica_id, snapshot.at_s] = snapshot
