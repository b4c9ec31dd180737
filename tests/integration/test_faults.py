"""Parts of a whole service are killed and stopped while turns run. Each fault comes at least twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import openai
import psutil
import pytest
from live_service import MODEL, LiveService, pause, resume

from loadtests.service.upgrades import upgrade
from wisp_core.tiny_model.tiny_tokenizer import topic_words

NUM_SESSIONS = 6
OUTAGE_S = 20.0


@dataclass(frozen=True)
class Turn:
    session: int
    began_s: float
    ended_s: float
    text: str
    error: str | None
    has_begun: bool
    """Whether anything of the answer had come, which a client cannot ask for again."""


@dataclass
class Traffic:
    """Turns of several sessions, streamed and not, that run until told to stop."""

    turns: list[Turn] = field(default_factory=list)
    is_over: bool = False

    def since(self, time_s: float) -> list[Turn]:
        return [turn for turn in self.turns if turn.began_s >= time_s]

    def lost(self) -> list[Turn]:
        """Turns that failed although nothing had been sent."""
        return [turn for turn in self.turns if turn.error is not None and not turn.has_begun]

    async def wait_for(self, num_turns: int, since_s: float, timeout_s: float = 60.0) -> None:
        """Until each session has finished that many good turns that began after ``since_s``."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            good = Counter(turn.session for turn in self.since(since_s) if turn.error is None)
            if all(good[session] >= num_turns for session in range(NUM_SESSIONS)):
                return
            assert time.monotonic() < deadline_s, f"sessions got {dict(good)} turns in {timeout_s} s"
            await asyncio.sleep(0.1)


async def _turn(client: openai.AsyncOpenAI, session: int, number: int) -> Turn:
    began_s, text, error, has_begun = time.monotonic(), "", None, False
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": " " + " ".join(topic_words(session)[number % 100 :][:30])}],
        "max_tokens": 40,
        "seed": number,
        "extra_headers": {"x-session-id": f"fault-{session}"},
    }
    try:
        if session % 2:
            answer = await client.chat.completions.create(**request)
            text = answer.choices[0].message.content
        else:
            chunks = await client.chat.completions.create(**request, stream=True)
            has_begun = True
            async for chunk in chunks:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
    except openai.OpenAIError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return Turn(session, began_s, time.monotonic(), text, error, has_begun)


@asynccontextmanager
async def traffic(service: LiveService, max_retries: int = 0) -> AsyncIterator[Traffic]:
    """Every session runs one turn after the other while the context is open; ``max_retries`` by the client itself."""
    running = Traffic()

    async def run(client: openai.AsyncOpenAI, session: int) -> None:
        number = 0
        while not running.is_over:
            running.turns.append(await _turn(client, session, number))
            number += 1
            await asyncio.sleep(0.05)

    options = {"api_key": service.key(), "max_retries": max_retries, "timeout": 120}
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", **options) as client, asyncio.TaskGroup() as group:
        for session in range(NUM_SESSIONS):
            group.create_task(run(client, session))
        try:
            yield running
        finally:
            running.is_over = True


@pytest.fixture
def service(live_service: LiveService) -> LiveService:
    live_service.wait_ready()
    return live_service


@pytest.mark.parametrize("number", [0, 1])
async def test_killed_engine(service: LiveService, number: int) -> None:
    engines = service.processes("VLLM::EngineCore")
    assert len(engines) == 2
    async with traffic(service) as running:
        await running.wait_for(1, 0.0)
        killed_s, killed_at_s = time.monotonic(), time.time()
        engines[number].kill()
        await _until_not_ready(service, within_s=5.0)
        status = await asyncio.to_thread(service.readiness)
        assert status[1]["healthy"] == 1
        # With one engine gone every session goes on, at the other replica.
        homes = asyncio.create_task(_homes_until_ready(service, killed_at_s + 1.0))
        await running.wait_for(2, killed_s)
        survivor = next(one["replica_id"] for one in status[1]["replicas"] if one["is_healthy"])
        assert await homes == {survivor}
        await asyncio.to_thread(service.wait_ready)
        await running.wait_for(1, time.monotonic())
    assert running.lost() == []
    assert all(turn.error is None for turn in running.turns if turn.session % 2), "an unstreamed turn failed"
    assert len(service.processes("VLLM::EngineCore")) == 2


@pytest.mark.parametrize("number", [0, 1])
async def test_killed_replica(service: LiveService, number: int) -> None:
    replicas = service.processes("ServeReplica:wisp-test:Replica")
    engines = service.processes("VLLM::EngineCore")
    assert len(replicas) == len(engines) == 2
    async with traffic(service) as running:
        await running.wait_for(1, 0.0)
        killed_s = time.monotonic()
        replicas[number].kill()
        # Its sessions go on at the other one, and its engine does not outlive it.
        await running.wait_for(2, killed_s)
        await _until_back(service, replicas[number], engines)
        await running.wait_for(1, time.monotonic())
    assert running.lost() == []
    assert all(turn.error is None for turn in running.turns if turn.session % 2), "an unstreamed turn failed"


async def _until_back(service: LiveService, killed: psutil.Process, engines: list[psutil.Process]) -> None:
    """Until Serve has replaced a killed replica, with an engine of its own."""

    def is_back() -> bool:
        replicas, alive = service.processes("ServeReplica:wisp-test:Replica"), service.processes("VLLM::EngineCore")
        return killed not in replicas and alive != engines and len(replicas) == len(alive) == 2

    deadline_s = time.monotonic() + 120
    while not await asyncio.to_thread(is_back):
        assert time.monotonic() < deadline_s, "Serve did not bring the replica back"
        await asyncio.sleep(0.2)
    await asyncio.to_thread(service.wait_ready)


@pytest.mark.parametrize("number", [0, 1])
async def test_killed_ingress(service: LiveService, number: int) -> None:
    (ingress,) = service.processes("ServeReplica:wisp-test:Ingress")
    # The connection breaks with the process: a turn that has sent nothing is sent again, as the client does by default.
    async with traffic(service, max_retries=2) as running:
        await running.wait_for(1, 0.0)
        ingress.kill()
        await running.wait_for(2, time.monotonic())
    assert running.lost() == []
    assert len(service.processes("VLLM::EngineCore")) == 2


@pytest.mark.parametrize("number", [0, 1])
async def test_valkey_comes_back_empty(service: LiveService, number: int) -> None:
    (valkey,) = service.processes("valkey-server")
    wisp = psutil.Process(service.process.pid)
    async with traffic(service) as running:
        await running.wait_for(1, 0.0)
        pause(wisp)
        try:
            valkey.kill()
            shutil.rmtree(next(service.state_dir.rglob("appendonlydir")))
        finally:
            resume(wisp)
        # Sessions, replicas and tenants are there again with their next turns, from what the processes know.
        deadline_s = time.monotonic() + 20
        while len(set(await asyncio.to_thread(_placed, service))) < NUM_SESSIONS:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.3)
    assert [turn.error for turn in running.turns if turn.error] == []
    assert len(await asyncio.to_thread(_reporting, service)) == 2
    with service.client() as client:
        assert client.models.list().data


def _placed(service: LiveService) -> list[str]:
    """Sessions of the traffic that the store knows the home of."""
    with contextlib.suppress(httpx.HTTPStatusError):
        sessions = service.status()["sessions"]
        return [one["session_key"] for one in sessions if one["home"] and "fault-" in one["session_key"]]
    return []


async def _until_not_ready(service: LiveService, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while (await asyncio.to_thread(service.readiness))[0] != 503:
        assert time.monotonic() < deadline_s, "/readyz does not tell"
        await asyncio.sleep(0.05)


async def _homes_until_ready(service: LiveService, since_s: float) -> set[str]:
    """Where the turns ran that ended after ``since_s``, Unix time, and before all engines serve again."""
    found: set[str] = set()
    while True:
        status = await asyncio.to_thread(service.status)
        await asyncio.sleep(0.6)  # Readiness may be half a second old.
        if (await asyncio.to_thread(service.readiness))[0] != 503:
            return found
        found |= {
            one["replica_id"]
            for one in status["sessions"]
            if "fault-" in one["session_key"] and one["last_turn_at_s"] >= since_s
        }


@pytest.mark.parametrize("how", ["hung", "gone"])
async def test_no_valkey_for_twenty_seconds(service: LiveService, how: str) -> None:
    (valkey,) = service.processes("valkey-server")
    async with traffic(service) as running:
        await running.wait_for(1, 0.0)
        # `wisp serve` starts a server that is gone again; stopped, it cannot.
        stopped = valkey if how == "hung" else psutil.Process(service.process.pid)
        pause(stopped)
        stopped_s = time.monotonic()
        try:
            if how == "gone":
                valkey.kill()
            await running.wait_for(2, stopped_s)
            await asyncio.sleep(max(0.0, stopped_s + OUTAGE_S - time.monotonic()))
            await running.wait_for(1, stopped_s + OUTAGE_S - 8)
        finally:
            resume(stopped)
        await running.wait_for(2, time.monotonic())
    assert [turn.error for turn in running.turns if turn.error] == []
    # The service has its state back: replicas report again.
    deadline_s = time.monotonic() + 20
    while len(await asyncio.to_thread(_reporting, service)) < 2:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.3)


def _reporting(service: LiveService) -> list[str]:
    """Replicas with a fresh snapshot; none while the store does not answer."""
    with contextlib.suppress(httpx.HTTPStatusError):
        replicas = service.status()["replicas"]
        return [one["snapshot"]["replica_id"] for one in replicas if not one["is_stale"]]
    return []


@pytest.mark.parametrize("how", ["hung", "killed", "killed-again"])
async def test_no_policy_service(service: LiveService, how: str) -> None:
    (policy,) = service.processes("PolicyService")
    async with traffic(service) as running:
        await running.wait_for(1, 0.0)
        pause(policy)
        # A plan that was written before the pause may still be carried out.
        await asyncio.sleep(2.0)
        stopped_s = time.monotonic()
        splits = await asyncio.to_thread(_splits, service)
        try:
            await running.wait_for(3, stopped_s)
            assert await asyncio.to_thread(_splits, service) == splits
        finally:
            if how.startswith("killed"):
                policy.kill()
            else:
                resume(policy)
        await running.wait_for(1, time.monotonic())
    assert [turn.error for turn in running.turns if turn.error] == []
    deadline_s = time.monotonic() + 60
    while not any(process.status() == "sleeping" for process in service.processes("PolicyService")):
        assert time.monotonic() < deadline_s, "Serve did not bring the policy service back"
        await asyncio.sleep(0.3)


def _splits(service: LiveService) -> dict[str, object]:
    return {one["snapshot"]["replica_id"]: one["snapshot"]["split"] for one in service.status()["replicas"]}


async def test_an_upgrade_fails_no_turn_and_keeps_the_engines(service: LiveService) -> None:
    engines = service.processes("VLLM::EngineCore")
    (old,) = service.processes("ServeReplica:wisp-test:Ingress")
    async with traffic(service) as running:
        await running.wait_for(1, 0.0)
        await asyncio.to_thread(upgrade, service, "upgrade", random.Random(0))
        await running.wait_for(1, time.monotonic())
        # The old ingress ends with its last stream.
        deadline_s = time.monotonic() + 30
        while old in (ingresses := service.processes("ServeReplica:wisp-test:Ingress")):
            assert time.monotonic() < deadline_s, "the old ingress goes on"
            await asyncio.sleep(0.2)
    assert [turn.error for turn in running.turns if turn.error] == []
    assert len(ingresses) == 1
    assert service.processes("VLLM::EngineCore") == engines
