"""`WispEngine` on vLLM's own processes: serving, resizing under load, hanging, dying, coming back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import psutil
import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, full_split

from wisp_core.contracts import Barrier, Outcome, ResizeOutcome, Split, SplitPlan
from wisp_core.engine import engine as engine_module
from wisp_core.engine.control import CommandFailedError
from wisp_core.engine.engine import EngineRequest, WispEngine
from wisp_core.errors import ConfigurationError, EngineUnavailableError
from wisp_core.memory import smaps
from wisp_core.memory.memfd import MAPPING_PREFIX
from wisp_core.settings import WispSettings

ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 512,
    "block_size": 32,
    "max_num_seqs": 8,
    "dtype": "float32",  # answers then do not depend on who else is in the batch
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}
DRAIN_TIMEOUT_S = 0.2


class Live:
    """A running engine and the loop it lives in."""

    def __init__(self, runner: asyncio.Runner, engine: WispEngine) -> None:
        self.runner = runner
        self.engine = engine
        self.revision = 0

    def run(self, awaitable: Any) -> Any:
        return self.runner.run(awaitable)

    async def plan(self, cap: int, barrier: Barrier = Barrier.BALLOON) -> SplitPlan:
        self.revision += 1
        snapshot = await self.engine.snapshot()
        return SplitPlan(
            replica_id="replica-1",
            incarnation=snapshot.incarnation,
            revision=self.revision,
            split=full_split(snapshot, cap),
            barrier=barrier,
            policy="test",
            reason="asked for",
        )

    async def move(self, cap: int, barrier: Barrier = Barrier.BALLOON) -> ResizeOutcome:
        return await self.engine.resize(await self.plan(cap, barrier))

    async def chat(self, number: int, max_tokens: int = 60, words: int = 20) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"task {number} " + "look again " * words}],
            "max_tokens": max_tokens,
            "seed": number,
            "temperature": 1,
            "ignore_eos": True,
            "vllm_xargs": {"wisp_session": f"acme/ada/{number}"},
        }
        status, answer = await self.call("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        found: dict[str, Any] = json.loads(answer)
        return found

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        chunks: list[bytes] = []
        status = 0
        requests = iter([{"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}])

        async def receive() -> dict[str, Any]:
            request = next(requests, None)
            if request is None:
                await asyncio.Event().wait()
            return request or {}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            chunks.append(message.get("body", b""))

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.engine.app(scope, receive, send)
        return status, b"".join(chunks)


def request(model: Path, engine_args: dict[str, Any], settings: WispSettings) -> EngineRequest:
    return EngineRequest(
        model=str(model), served_name="tiny", engine_args=engine_args, settings=settings, replica_id="replica-1"
    )


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[Live]:
    settings = WispSettings(
        vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES, cap=8, drain_timeout_s=DRAIN_TIMEOUT_S
    )
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        engine = runner.run(WispEngine.start(request(tiny_model, ENGINE_ARGS, settings)))
        yield Live(runner, engine)
        runner.run(engine.shutdown())


def test_it_starts_at_the_configured_split_and_serves(live: Live) -> None:
    snapshot = live.run(live.engine.snapshot())
    assert snapshot.split == full_split(snapshot, 8)
    assert (snapshot.replica_id, snapshot.model) == ("replica-1", "tiny")
    answer = live.run(live.chat(1))
    assert answer["usage"]["completion_tokens"] == 60
    assert live.run(live.call("GET", "/health"))[0] == 200


class PoolWatch:
    """A thread that adds up the memory of both pools over and over, as the system counts it.

    It reads the pool that is to grow first: what moves between two readings is then missed once, never counted twice.
    """

    def __init__(self, pids: list[int], growing: str) -> None:
        names = {path: os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()}
        # A mapping holds its file open by a descriptor of its own.
        pools = {path.stat().st_ino: path for path, name in names.items() if name.startswith(MAPPING_PREFIX)}
        growing = f"{MAPPING_PREFIX}{growing}"
        self._files = sorted(pools.values(), key=lambda path: not names[path].startswith(growing))
        self.readings: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.readings.append(sum(path.stat().st_blocks for path in self._files) * 512)


def test_the_budget_holds_as_seen_from_outside_at_any_moment(live: Live) -> None:
    async def move(cap: int) -> ResizeOutcome:
        turn = asyncio.create_task(live.chat(3))
        await asyncio.sleep(0.1)
        outcome = await live.move(cap)
        await turn
        return outcome

    for cap, growing in ((20, "experts"), (4, "kv")):
        with PoolWatch(live.engine.engine_pids(), growing) as watch:
            assert live.run(move(cap)).outcome is Outcome.APPLIED
        snapshot = live.run(live.engine.snapshot())
        assert len(watch.readings) > 10
        assert max(watch.readings) <= snapshot.budget_bytes
        resident_bytes = sum(smaps.resident_bytes(pid) for pid in live.engine.engine_pids())
        assert resident_bytes == watch.readings[-1] == snapshot.layout.pool_bytes(snapshot.split)


def test_sessions_come_out_of_requests(live: Live) -> None:
    live.run(live.engine.signatures())
    live.run(live.chat(2, max_tokens=9))
    found = {signature.key: signature for signature in live.run(live.engine.signatures())}
    assert set(found) == {"replica-1", "acme", "acme/ada", "acme/ada/2"}
    assert found["acme/ada/2"].decode_tokens == 8


def test_turns_go_on_unchanged_while_the_engine_is_resized(live: Live) -> None:
    async def together() -> tuple[list[str], list[ResizeOutcome]]:
        turns = [asyncio.create_task(live.chat(number, max_tokens=200)) for number in range(6)]
        outcomes = []
        for cap in (20, 6, 14, 4):
            await asyncio.sleep(0.2)
            outcomes.append(await live.move(cap))
        assert not all(turn.done() for turn in turns)
        return [text(await turn) for turn in turns], outcomes

    expected = [text(live.run(live.chat(number, max_tokens=200))) for number in range(6)]
    found, outcomes = live.run(together())
    assert found == expected
    assert [outcome.outcome for outcome in outcomes] == [Outcome.APPLIED] * 4
    assert all(outcome.pause_ms > 0 and outcome.bytes_moved > 0 for outcome in outcomes)
    live.run(live.engine.check_integrity())


def test_a_resize_keeps_the_prefix_cache(live: Live) -> None:
    def cached() -> int:
        return int(live.run(live.chat(50, 4, words=60))["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    before = cached()
    assert before > 0
    for cap in (16, 5):
        assert live.run(live.move(cap)).outcome is Outcome.APPLIED
        assert cached() == before


def test_the_drained_barrier_defers_while_a_turn_runs_and_holds_new_ones_back(live: Live) -> None:
    async def scene() -> tuple[ResizeOutcome, int, ResizeOutcome]:
        long = asyncio.create_task(live.chat(7, max_tokens=400))
        await asyncio.sleep(0.1)
        blocked = asyncio.create_task(live.move(16, Barrier.DRAINED))
        await asyncio.sleep(DRAIN_TIMEOUT_S / 4)
        newcomer = asyncio.create_task(live.chat(8, max_tokens=2))
        await asyncio.sleep(DRAIN_TIMEOUT_S / 4)
        assert not newcomer.done()
        deferred = await blocked
        tokens = (await newcomer)["usage"]["completion_tokens"]
        assert not long.done()
        await long
        return deferred, tokens, await live.move(16, Barrier.DRAINED)

    deferred, tokens, applied = live.run(scene())
    assert (deferred.outcome, deferred.before) == (Outcome.DEFERRED, deferred.after)
    assert tokens == 2
    assert (applied.outcome, applied.after.cap) == (Outcome.APPLIED, 16)


def test_two_resizes_at_once_conflict(live: Live) -> None:
    async def scene() -> list[ResizeOutcome]:
        plans = [await live.plan(10), await live.plan(12)]
        return list(await asyncio.gather(*map(live.engine.resize, plans)))

    assert [outcome.outcome for outcome in live.run(scene())] == [Outcome.APPLIED, Outcome.CONFLICT]


def test_vllm_s_own_pause_still_works_after_a_shrink(live: Live) -> None:
    async def scene() -> None:
        assert (await live.move(24)).outcome is Outcome.APPLIED
        vllm = live.engine._alive().llm
        await vllm.pause_generation(mode="wait", clear_cache=True)
        await vllm.resume_generation()

    live.run(scene())
    assert live.run(live.chat(9))["usage"]["completion_tokens"] == 60
    live.run(live.engine.check_integrity())


def test_a_plan_below_the_floor_fails(live: Live) -> None:
    async def scene() -> ResizeOutcome:
        plan = await live.plan(8)
        return await live.engine.resize(plan.model_copy(update={"split": Split(cap=8, kv_blocks=15)}))

    outcome = live.run(scene())
    assert (outcome.outcome, "κ_min" in outcome.reason) == (Outcome.FAILED, True)


def test_unknown_arguments_are_refused(live: Live, tiny_model: Path) -> None:
    unknown = {"max_model_length": 5, "tool_parser": "x"}
    start = WispEngine.start(request(tiny_model, unknown, WispSettings(vram_budget_bytes=BUDGET_BYTES)))
    with pytest.raises(ConfigurationError, match="unknown to vLLM: max_model_length, tool_parser"):
        live.run(start)


async def test_an_engine_whose_start_is_cancelled_is_ended_once_it_is_built(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_building, may_end, was_ended = threading.Event(), threading.Event(), threading.Event()

    def build(args: Any) -> Any:
        is_building.set()
        assert may_end.wait(10)
        return SimpleNamespace(shutdown=was_ended.set)

    monkeypatch.setattr(engine_module, "_build", build)
    settings = WispSettings(vram_budget_bytes=BUDGET_BYTES)
    starting = asyncio.create_task(WispEngine.start(request(tiny_model, ENGINE_ARGS, settings)))
    await asyncio.to_thread(is_building.wait, 10)
    starting.cancel()
    done, _ = await asyncio.wait([starting], timeout=0.1)
    assert not done, "two engines never hold memory at once: this one's end is waited for"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert was_ended.is_set()


def test_a_hung_engine_is_noticed_and_replaced(live: Live) -> None:
    plan = live.run(live.plan(8))
    pids = live.engine.engine_pids()
    os.kill(pids[-1], signal.SIGSTOP)
    with pytest.raises(EngineUnavailableError, match="did not answer within 1 s"):
        live.run(live.engine.heartbeat(1.0))
    assert not live.engine.is_dead  # vLLM itself has not noticed
    live.run(live.engine.restart())
    assert not any(psutil.pid_exists(pid) for pid in pids)
    live.run(live.engine.heartbeat(5.0))
    assert live.run(live.engine.resize(plan)).outcome is Outcome.STALE
    snapshot = live.run(live.engine.snapshot())
    assert snapshot.incarnation != plan.incarnation
    assert snapshot.split.cap == 8
    assert live.run(live.chat(1))["usage"]["completion_tokens"] == 60


def test_an_engine_that_can_run_no_step_fails_its_heartbeat() -> None:
    async def ping() -> None:
        raise CommandFailedError("wisp_pid: moving pages failed")

    engine = WispEngine(cast("Any", None))
    engine._live = cast("Any", SimpleNamespace(llm=SimpleNamespace(errored=False), control=SimpleNamespace(ping=ping)))
    with pytest.raises(EngineUnavailableError, match="can run no step: wisp_pid: moving pages failed"):
        asyncio.run(engine.heartbeat(1.0))


def test_a_killed_engine_is_dead_at_once(live: Live) -> None:
    async def scene() -> tuple[int, bytes]:
        turn = asyncio.create_task(
            live.call(
                "POST", "/v1/completions", {"model": "tiny", "prompt": "go", "max_tokens": 400, "ignore_eos": True}
            )
        )
        await asyncio.sleep(0.2)
        # Stopped first, so that it dies while these wait for it: vLLM would leave them waiting.
        os.kill(live.engine.engine_pids()[0], signal.SIGSTOP)
        asked = [asyncio.create_task(live.engine.heartbeat(60.0)), asyncio.create_task(live.engine.snapshot())]
        await asyncio.sleep(0.2)
        os.kill(live.engine.engine_pids()[0], signal.SIGKILL)
        async with asyncio.timeout(10.0):
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [EngineUnavailableError] * 2
        return await turn

    assert live.run(scene())[0] == 500
    assert live.engine.is_dead
    for call in (live.engine.snapshot, live.engine.check_integrity, lambda: live.engine.heartbeat(1.0)):
        with pytest.raises(EngineUnavailableError):
            live.run(call())
    with pytest.raises(EngineUnavailableError):
        live.run(live.call("GET", "/health"))
