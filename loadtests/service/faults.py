"""Parts of a whole service are killed while turns run, again and again: turns lost, time until all is back, answers.

A turn is lost if it failed although nothing of its answer had come. Where the ingress itself is killed the connection
breaks, which no server can mend; there a turn counts as lost if it still fails when sent again, as OpenAI's clients do.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.report import write_content
from loadtests.rows import Row, quantile
from loadtests.service.fault_traffic import TENANT, Traffic, TrafficConfig, traffic
from loadtests.service.rescore import Answer, rescore
from loadtests.service.running import SMALL_MODEL, RunningService, service_file, temporary_service, tenant
from loadtests.service.stream_client import StreamedTurn
from loadtests.service.upgrades import UPGRADES, upgrade
from wisp_core.errors import EngineUnavailableError
from wisp_core.tiny_model.tiny import write_tiny_model

MODEL = "tiny"
KINDS = {
    "engine": "VLLM::EngineCore",
    "replica": "ServeReplica:faults:Replica",
    "ingress": "ServeReplica:faults:Ingress",
    "policy": "ServeReplica:faults-policy:PolicyService",
    "valkey": "valkey-server",
}
"""Each kind of fault: whose process is killed."""
ALL_KINDS = (*KINDS, *UPGRADES)
MAX_GAP = 0.05
"""Log-probability: further from the best one no token of a greedy answer may be."""
RECOVERY_TIMEOUT_S = 180.0
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "block_size": 32,
}


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """One run."""

    name: str = "faults"
    rounds: int = 20
    """Faults of each kind."""
    kinds: tuple[str, ...] = ALL_KINDS
    max_run_s: float = 36_000.0
    """No fault begins later than this after the service was ready."""
    traffic: TrafficConfig = field(default_factory=lambda: TrafficConfig(model=MODEL))
    rescored_per_fault: int = 10
    """Answers of each fault that the resident engine looks at, spread over the time until all was back."""


async def inject(
    service: RunningService, running: Traffic, kind: str, chooser: random.Random
) -> tuple[Row, list[StreamedTurn]]:
    """Kill one process of ``kind``, or upgrade, and wait until everything is back: a row, and the turns of that time.

    Raises RuntimeError when it does not come back.
    """
    running.may_resend = kind == "ingress"
    first, num_in_flight = len(running.turns), len(running.in_flight)
    num_without_token = sum(not turn.token_texts for turn in running.in_flight)
    began_s = time.monotonic()
    back = asyncio.create_task(asyncio.to_thread(upgrade if kind in UPGRADES else _kill, service, kind, chooser))
    await _until(lambda: running.good_since(began_s) > 0, RECOVERY_TIMEOUT_S)
    next_good_s = time.monotonic() - began_s
    await back
    recovery_s = time.monotonic() - began_s
    again_s = time.monotonic()
    await _until(lambda: running.good_since(again_s) >= 2 * running.config.sessions, RECOVERY_TIMEOUT_S)
    turns = running.turns[first:]
    row = {
        "kind": kind,
        "turns": len(turns),
        "in_flight": num_in_flight,
        "in_flight_without_token": num_without_token,
        "lost_turns": sum(turn.is_lost for turn in turns),
        "broken_streams": sum(turn.error is not None and bool(turn.token_texts) for turn in turns),
        "sent_twice": sum(turn.attempts > 1 for turn in turns),
        "next_good_turn_s": next_good_s,
        "recovery_s": recovery_s,
        "errors": sorted({turn.error for turn in turns if turn.error is not None}),
    }
    return row, turns


def _kill(service: RunningService, kind: str, chooser: random.Random) -> None:
    before = service.processes(KINDS[kind])
    victim = chooser.choice(before)
    victim.kill()
    _wait_back(service, KINDS[kind], {one.pid for one in before}, victim.pid)


def _wait_back(service: RunningService, title: str, before: set[int], victim: int) -> None:
    """Return when as many processes run as before, without the victim, and every engine serves."""
    deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        pids = {process.pid for process in service.processes(title)} - {victim}
        if len(pids) >= len(before):
            service.wait_ready(RECOVERY_TIMEOUT_S)
            service.status()
            return
        time.sleep(0.1)
    raise RuntimeError(f"{title} did not come back:\n{service.log()[-2000:]}")


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no turn was answered within {timeout_s:g} s")
        await asyncio.sleep(0.02)


def service_config(directory: Path) -> dict[str, Any]:
    """Two paged replicas of a tiny model."""
    replica = {
        "count": 2,
        "vram_budget_bytes": 40 << 20,
        "activation_bytes": 4 << 20,
        "graceful_shutdown_timeout_s": 10,
        "engine": ENGINE_ARGS,
    }
    return service_file("faults", directory, MODEL, replica, [tenant(directory, TENANT)], policy={})


class Findings:
    """What a run has found: rows, and the answers to be rescored. Kept after each fault, so that a run may be cut."""

    def __init__(self, keep_rows: Callable[[list[Row]], None], answers_path: Path) -> None:
        """``keep_rows`` writes the rows so far; the answers so far are in ``answers_path`` until they are rescored."""
        self.rows: list[Row] = []
        self.answers: list[Answer] = []
        self._keep_rows = keep_rows
        self._answers_path = answers_path

    def add(self, row: Row, answers: list[Answer]) -> None:
        """Add a fault."""
        self.rows.append(row)
        self.answers += answers
        self._keep_rows(self.rows)
        self._answers_path.write_text(json.dumps(self.answers))

    def rescore(self) -> None:
        """Add a row: how far the answers are from those of an engine with all experts."""
        self.rows.append(_rescored(self.answers))
        self._keep_rows(self.rows)
        if "error" not in self.rows[-1]:
            self._answers_path.unlink(missing_ok=True)


def answers_path(result: Path) -> Path:
    """Where the answers of the run of ``result`` wait for being rescored."""
    return result.with_suffix(".answers.json")


def rescore_cut_run(result: Path) -> None:
    """Rescore the answers of a run that ended before it did that itself, and add the row to its file."""
    waiting = answers_path(result)
    if not waiting.exists():
        return
    content = json.loads(result.read_text())
    rows = [row for row in content["rows"] if "rescored" not in row]
    rows.append(_rescored(json.loads(waiting.read_text())))
    write_content(result, {**content, "rows": rows, "summary": summarize(rows)})
    if "error" not in rows[-1]:
        waiting.unlink()


def measure(config: FaultsConfig, findings: Findings) -> None:
    """Rounds of every kind of fault, each in an order of its own, and one row with the answers' distances."""
    chooser = random.Random(0)
    order = [kind for _ in range(config.rounds) for kind in chooser.sample(config.kinds, len(config.kinds))]
    with temporary_service(service_config) as service:
        asyncio.run(_inject_all(service, config, order, chooser, findings))
    findings.rescore()


async def _inject_all(
    service: RunningService, config: FaultsConfig, order: list[str], chooser: random.Random, findings: Findings
) -> None:
    until_s = time.monotonic() + config.max_run_s
    async with traffic(service, config.traffic) as running:
        await _until(lambda: running.good_since(0.0) >= config.traffic.sessions, RECOVERY_TIMEOUT_S)
        for kind in order:
            if time.monotonic() > until_s:
                break
            try:
                row, turns = await inject(service, running, kind, chooser)
            except RuntimeError as error:  # What was found so far is worth keeping, and this most of all.
                findings.add({"kind": kind, "not_recovered": str(error)[-2000:]}, [])
                break
            findings.add(row, picked_answers(turns, config.rescored_per_fault))


def picked_answers(turns: list[StreamedTurn], count: int) -> list[Answer]:
    """About ``count`` whole answers of ``turns``, at even distances."""
    good = [turn for turn in turns if turn.error is None and turn.token_texts]
    picked = good[:: max(1, -(-len(good) // count))]
    return [{"prompt": turn.prompt, "tokens": turn.token_texts} for turn in picked]


def _rescored(answers: list[Answer]) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_tiny_model(directory / "model", SMALL_MODEL)
        engine_args = ENGINE_ARGS | {"kv_cache_memory_bytes": 32 << 20}
        try:
            gaps = rescore(str(directory / "model"), engine_args, answers, directory)
        except EngineUnavailableError as error:  # The faults themselves are worth keeping.
            return {"rescored": 0, "largest_gap": 0.0, "above_limit": 0, "error": str(error)[-2000:]}
    return {
        "rescored": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "above_limit": sum(gap > MAX_GAP for gap in gaps),
    }


def summarize(rows: list[Row]) -> Row:
    """Lost turns and recovery times by kind, and the answers."""
    faults = [row for row in rows if "recovery_s" in row]
    kinds = sorted({row["kind"] for row in faults})
    rescored = [row for row in rows if "rescored" in row]
    return {
        "faults": {kind: sum(row["kind"] == kind for row in faults) for kind in kinds},
        "turns": sum(row["turns"] for row in faults),
        "turns_in_flight": sum(row["in_flight"] for row in faults),
        "turns_in_flight_without_token": sum(row["in_flight_without_token"] for row in faults),
        "lost_turns": sum(row["lost_turns"] for row in faults),
        "broken_streams": sum(row["broken_streams"] for row in faults),
        "recovery_p50_s": {k: quantile([r["recovery_s"] for r in faults if r["kind"] == k], 0.5) for k in kinds},
        "recovery_max_s": {k: max(r["recovery_s"] for r in faults if r["kind"] == k) for k in kinds},
        "next_good_turn_max_s": {k: max(r["next_good_turn_s"] for r in faults if r["kind"] == k) for k in kinds},
        "not_recovered": sum("not_recovered" in row for row in rows),
        "answers_rescored": sum(row["rescored"] for row in rescored),
        "largest_gap": max((row["largest_gap"] for row in rescored), default=None),
        "answers_above_gap": sum(row["above_limit"] for row in rescored),
    }


def holds(summary: Row) -> bool:
    """Whether no turn was lost, everything came back, and every answer is the model's."""
    return bool(
        summary["lost_turns"] == summary["not_recovered"] == summary["answers_above_gap"] == 0
        and summary["answers_rescored"] > 0
    )
