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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtests.service.rescore import Answer, rescore
from loadtests.service.results import quantile
from loadtests.service.running import RunningService, free_port
from loadtests.service.upgrades import UPGRADES, upgrade
from wisp_core.model.tiny import TinyModelConfig, write_tiny_model
from wisp_core.model.tiny_tokenizer import topic_words

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

    rounds: int = 20
    """Faults of each kind."""
    kinds: tuple[str, ...] = ALL_KINDS
    max_run_s: float = 36_000.0
    """No fault begins later."""
    sessions: int = 6
    max_tokens: int = 40
    rescored: int = 200
    """Answers that the resident engine looks at, spread over the run."""


@dataclass
class TurnSeen:
    """One turn, as its client saw it."""

    began_s: float
    prompt: str
    tokens: list[str] = field(default_factory=list)
    error: str | None = None
    attempts: int = 1

    @property
    def is_lost(self) -> bool:
        """Failed, and nothing had come."""
        return self.error is not None and not self.tokens


class Traffic:
    """Sessions that send one turn after the other."""

    def __init__(self, service: RunningService, client: httpx.AsyncClient, config: FaultsConfig) -> None:
        self.turns: list[TurnSeen] = []
        self.may_resend = False
        """Whether a turn that failed before its first token is sent once more."""
        self.num_sessions = config.sessions
        self._service = service
        self._client = client
        self._config = config

    async def run(self, session: int) -> None:
        """Send turns until cancelled."""
        chooser = random.Random(session)
        headers = {"authorization": f"Bearer {self._service.key('acme')}", "x-session-id": f"s{session}"}
        while True:
            seen = TurnSeen(time.monotonic(), " " + " ".join(chooser.choices(topic_words(session % 8), k=30)))
            await self._send(seen, headers)
            if seen.is_lost and self.may_resend:
                await asyncio.sleep(0.5)
                seen.error, seen.attempts = None, 2
                await self._send(seen, headers)
            self.turns.append(seen)
            await asyncio.sleep(0.05)

    async def _send(self, seen: TurnSeen, headers: dict[str, str]) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": seen.prompt}],
            "max_tokens": self._config.max_tokens,
            "temperature": 0,
            "logprobs": True,
            "stream": True,
        }
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    seen.error = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
                    return
                await _read_tokens(seen, response)
        except httpx.HTTPError as error:
            seen.error = type(error).__name__

    def good_since(self, time_s: float) -> int:
        """Turns that began later and were answered in full."""
        return sum(turn.began_s >= time_s and turn.error is None for turn in self.turns)


async def _read_tokens(seen: TurnSeen, response: httpx.Response) -> None:
    is_done = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                seen.error = event["error"]["message"]
                return
            for choice in event["choices"]:
                seen.tokens += [one["token"] for one in (choice.get("logprobs") or {}).get("content") or ()]
    if not is_done:
        seen.error = "the stream ended early"


@asynccontextmanager
async def traffic(service: RunningService, config: FaultsConfig) -> AsyncIterator[Traffic]:
    """Sessions run while the context is open."""
    async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
        running = Traffic(service, client, config)
        tasks = [asyncio.create_task(running.run(session)) for session in range(config.sessions)]
        try:
            yield running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def inject(service: RunningService, running: Traffic, kind: str, chooser: random.Random) -> dict[str, Any]:
    """Kill one process of ``kind``, or upgrade, and wait until everything is back: a row."""
    running.may_resend = kind == "ingress"
    first = len(running.turns)
    began_s = time.monotonic()
    back = asyncio.create_task(asyncio.to_thread(upgrade if kind in UPGRADES else _kill, service, kind, chooser))
    await _until(lambda: running.good_since(began_s) > 0, RECOVERY_TIMEOUT_S)
    next_good_s = time.monotonic() - began_s
    await back
    recovery_s = time.monotonic() - began_s
    again_s = time.monotonic()
    await _until(lambda: running.good_since(again_s) >= 2 * running.num_sessions, RECOVERY_TIMEOUT_S)
    turns = running.turns[first:]
    return {
        "kind": kind,
        "turns": len(turns),
        "lost_turns": sum(turn.is_lost for turn in turns),
        "broken_streams": sum(turn.error is not None and bool(turn.tokens) for turn in turns),
        "sent_twice": sum(turn.attempts > 1 for turn in turns),
        "next_good_turn_s": next_good_s,
        "recovery_s": recovery_s,
        "errors": sorted({turn.error for turn in turns if turn.error is not None}),
    }


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
    return {
        "name": "faults",
        "state_dir": str(directory / "state"),
        "http": {"port": free_port()},
        "model": {"path": str(directory / "model"), "served_name": MODEL},
        "replica": {
            "count": 2,
            "vram_budget_bytes": 40 << 20,
            "activation_bytes": 4 << 20,
            "graceful_shutdown_timeout_s": 10,
            "engine": ENGINE_ARGS,
        },
        "tenants": [
            {
                "tenant_id": "acme",
                "key_file": str(directory / "acme.key"),
                "requests_per_minute": 1_000_000,
                "tokens_per_minute": 1_000_000_000,
            }
        ],
    }


Rows = list[dict[str, Any]]


def measure(config: FaultsConfig, on_rows: Callable[[Rows], None]) -> Rows:
    """Rounds of every kind of fault, each in an order of its own, and one row with the answers' distances.

    ``on_rows`` gets what is there after each fault.
    """
    chooser = random.Random(0)
    order = [kind for _ in range(config.rounds) for kind in chooser.sample(config.kinds, len(config.kinds))]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_tiny_model(directory / "model", TinyModelConfig(layers=2, experts=16, moe_intermediate=128))
        with RunningService(directory, service_config(directory)) as service:
            rows, turns = asyncio.run(_inject_all(service, config, order, chooser, on_rows))
        rows.append(_rescored(turns, config, directory))
    return rows


def _rescored(turns: list[TurnSeen], config: FaultsConfig, directory: Path) -> dict[str, Any]:
    """A row: how far answers of the whole run are from those of an engine with all experts."""
    good = [turn for turn in turns if turn.error is None and turn.tokens]
    picked = good[:: max(1, len(good) // config.rescored)][: config.rescored]
    answers: list[Answer] = [{"prompt": turn.prompt, "tokens": turn.tokens} for turn in picked]
    try:
        gaps = rescore(str(directory / "model"), ENGINE_ARGS | {"kv_cache_memory_bytes": 32 << 20}, answers, directory)
    except RuntimeError as error:  # The faults themselves are worth keeping.
        return {"rescored": 0, "largest_gap": 0.0, "above_limit": 0, "error": str(error)[-2000:]}
    return {"rescored": len(gaps), "largest_gap": max(gaps), "above_limit": sum(gap > MAX_GAP for gap in gaps)}


async def _inject_all(
    service: RunningService,
    config: FaultsConfig,
    order: list[str],
    chooser: random.Random,
    on_rows: Callable[[Rows], None],
) -> tuple[Rows, list[TurnSeen]]:
    rows: Rows = []
    until_s = time.monotonic() + config.max_run_s
    async with traffic(service, config) as running:
        await _until(lambda: running.good_since(0.0) >= config.sessions, RECOVERY_TIMEOUT_S)
        for kind in order:
            if time.monotonic() > until_s:
                break
            try:
                row = await inject(service, running, kind, chooser)
            except RuntimeError as error:  # What was found so far is worth keeping, and this most of all.
                row = {"kind": kind, "not_recovered": str(error)[-2000:]}
            rows.append(row)
            on_rows(rows)
            if "not_recovered" in row:
                break
    return rows, running.turns


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Lost turns and recovery times by kind, and the answers."""
    faults = [row for row in rows if "recovery_s" in row]
    kinds = sorted({row["kind"] for row in faults})
    rescored = [row for row in rows if "rescored" in row]
    return {
        "faults": {kind: sum(row["kind"] == kind for row in faults) for kind in kinds},
        "turns": sum(row["turns"] for row in faults),
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


def holds(summary: dict[str, Any]) -> bool:
    """Whether no turn was lost, everything came back, and every answer is the model's."""
    return bool(
        summary["lost_turns"] == summary["not_recovered"] == summary["answers_above_gap"] == 0
        and summary["answers_rescored"] > 0
    )
