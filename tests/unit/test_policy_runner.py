"""Policies in their own process: good ones answer, bad ones are contained."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from policy_snapshots import PAGE, make_snapshot, wants_experts

from services.config import DampingSettings, PolicySettings
from services.policy import runner as runner_module
from services.policy.metrics import PolicyMetrics
from services.policy.process import Fault, PolicyFaultError, PolicyProcess, PolicySpec
from services.policy.runner import PolicyRunner
from wisp_core.contracts import KvDemand, Split
from wisp_core.errors import ConfigurationError

BAD = '''
import math, os, sys, time
from wisp_core.contracts import Decision, Marginals, Split

HERE = os.path.dirname(__file__)

class Bad:
    """Does ``how`` as long as the file ``calm`` does not exist, else holds."""

    def __init__(self, how):
        self.how = how

    def initial_state(self):
        return 0

    def decide(self, snapshot, state):
        if os.path.exists(os.path.join(HERE, "calm")):
            return Decision(split=snapshot.split, reason=f"calm {state}"), state + 1
        return getattr(self, self.how)(snapshot), state

    def raises(self, snapshot):
        raise KeyError("curve")

    def sleeps(self, snapshot):
        print("about to hang")  # must not reach the protocol
        time.sleep(3600)

    def spins(self, snapshot):
        while True:
            pass

    def exits(self, snapshot):
        sys.exit(3)

    def dies(self, snapshot):
        os._exit(7)

    def hoards(self, snapshot):
        return bytearray(1 << 32)

    def nothing(self, snapshot):
        return None

    def mapping(self, snapshot):
        return {"split": {"cap": 4, "kv_blocks": 103}, "reason": "a dict"}

    def not_a_number(self, snapshot):
        return Decision(split=Split(cap=5, kv_blocks=60), reason="nan", predicted_cost=math.nan)

    def infinite(self, snapshot):
        marginals = Marginals(experts_s_per_byte=math.inf, kv_s_per_byte=0.0)
        return Decision(split=Split(cap=5, kv_blocks=60), reason="inf", marginals=marginals)

    def wrong_type(self, snapshot):
        return Decision.model_construct(split=Split.model_construct(cap="five", kv_blocks=60), reason="str")

    def chatters(self, snapshot):
        return Decision(split=snapshot.split, reason="x" * (2 << 20))

    def over_budget(self, snapshot):
        return Decision(split=Split(cap=8, kv_blocks=127), reason="all of it")

    def starves(self, snapshot):
        return Decision(split=Split(cap=8, kv_blocks=0), reason="no KV")

    def cap_out_of_range(self, snapshot):
        return Decision(split=Split(cap=99, kv_blocks=40), reason="more than E")
'''

Make = Callable[..., Awaitable[PolicyRunner]]


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the project that holds ``bad_policy:Bad``."""
    (tmp_path / "bad_policy.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def metrics() -> PolicyMetrics:
    return PolicyMetrics()


@pytest_asyncio.fixture
async def make(metrics: PolicyMetrics) -> AsyncIterator[Make]:
    """Starts runners and closes them; ``deadline_s`` is short and damping is off unless given."""
    runners: list[PolicyRunner] = []

    async def start(name: str, settings: dict[str, Any] | None = None, **changes: Any) -> PolicyRunner:
        fields = {"deadline_s": 0.5, "damping": DampingSettings(confirmations=1, dead_zone_fraction=0)} | changes
        runners.append(PolicyRunner(PolicySettings(name=name, settings=settings or {}, **fields), metrics))
        await runners[-1].start()
        return runners[-1]

    yield start
    for runner in runners:
        await runner.close()


def told_by_the_runner(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == runner_module.__name__]


def count(metrics: PolicyMetrics, kind: str) -> float:
    line = f'wisp_policy_faults_total{{kind="{kind}"}} '
    return next(float(text.removeprefix(line)) for text in metrics.scrape().splitlines() if text.startswith(line))


async def test_a_good_policy_answers_and_is_damped_per_replica(make: Make, metrics: PolicyMetrics) -> None:
    runner = await make("mv_wsa", deadline_s=10, damping=DampingSettings(confirmations=2))
    for replica_id in ("r1", "r2"):  # each replica confirms by itself
        first = await runner.decide(wants_experts(replica_id=replica_id))
        assert first is not None
        assert first.split.cap == 4
    second = await runner.decide(wants_experts(replica_id="r1"))
    assert second is not None
    assert second.split.cap == 8
    restarted = await runner.decide(wants_experts(replica_id="r1", incarnation="i2"))
    assert restarted is not None
    assert restarted.split.cap == 4
    assert all(count(metrics, fault.value) == 0 for fault in Fault)
    assert "wisp_policy_decide_duration_seconds_count 4.0" in metrics.scrape()


@pytest.mark.parametrize(
    ("how", "fault", "survives"),
    [
        ("raises", Fault.RAISED, True),
        ("hoards", Fault.RAISED, True),
        ("sleeps", Fault.TIMED_OUT, False),
        ("spins", Fault.TIMED_OUT, False),
        ("exits", Fault.EXITED, False),
        ("dies", Fault.EXITED, False),
        ("nothing", Fault.INVALID, True),
        ("mapping", Fault.INVALID, True),
        ("not_a_number", Fault.INVALID, True),
        ("infinite", Fault.INVALID, True),
        ("wrong_type", Fault.INVALID, True),
        ("cap_out_of_range", Fault.INVALID, True),
        ("chatters", Fault.INVALID, False),
        ("over_budget", Fault.OVER_BUDGET, True),
        ("starves", Fault.BELOW_FLOOR, True),
    ],
)
async def test_a_bad_policy_gives_no_decision_and_is_counted(
    how: str,
    fault: Fault,
    survives: bool,
    bad: Path,
    make: Make,
    metrics: PolicyMetrics,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = await make("bad_policy:Bad", {"how": how})
    process = runner._process
    assert process is not None
    started_s = time.monotonic()
    assert await runner.decide(make_snapshot()) is None
    assert time.monotonic() - started_s < 3
    assert {f.value: count(metrics, f.value) for f in Fault if count(metrics, f.value)} == {fault.value: 1}
    assert process.is_alive == survives
    assert [one.levelno for one in told_by_the_runner(caplog)] == [logging.ERROR]
    assert fault.value in caplog.text


async def test_a_hung_policy_is_restarted_with_back_off_and_recovers(
    bad: Path, make: Make, metrics: PolicyMetrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "FIRST_BACKOFF_S", 60.0)
    runner = await make("bad_policy:Bad", {"how": "sleeps"})
    assert runner._process is not None
    first_pid = runner._process.pid
    assert await runner.decide(make_snapshot()) is None
    with pytest.raises(ProcessLookupError):
        os.kill(first_pid, 0)

    assert await runner.decide(make_snapshot()) is None, "the first restart is immediate, and hangs again"
    assert count(metrics, "timed_out") == 2
    assert await runner.decide(make_snapshot()) is None, "the next start has to wait: neither asked nor counted"
    assert count(metrics, "timed_out") == 2
    assert len(told_by_the_runner(caplog)) == 1, "logged once per kind"

    (bad / "calm").touch()
    runner._start_at_s = 0.0
    decision = await runner.decide(make_snapshot())
    assert decision is not None
    assert decision.reason == "calm 0"
    assert "wisp_policy_restarts_total 2.0" in metrics.scrape()


async def test_a_policy_that_raised_keeps_its_process_and_state(bad: Path, make: Make) -> None:
    runner = await make("bad_policy:Bad", {"how": "raises"})
    (bad / "calm").touch()
    reasons = []
    for _ in range(2):
        decision = await runner.decide(make_snapshot())
        assert decision is not None
        reasons.append(decision.reason)
    (bad / "calm").unlink()
    assert await runner.decide(make_snapshot()) is None
    (bad / "calm").touch()
    decision = await runner.decide(make_snapshot())
    assert decision is not None
    assert [*reasons, decision.reason] == ["calm 0", "calm 1", "calm 2"]


async def test_a_hold_below_the_floor_is_no_fault_and_is_corrected(
    bad: Path, make: Make, metrics: PolicyMetrics
) -> None:
    runner = await make("static_split", deadline_s=10)
    starving = make_snapshot(split=Split(cap=8, kv_blocks=39), kv=KvDemand(floor_blocks=60))
    decision = await runner.decide(starving)
    assert decision is not None
    assert decision.split == Split(cap=6, kv_blocks=71)
    assert count(metrics, "below_floor") == 0


async def test_the_event_loop_stays_free_while_a_policy_hangs(bad: Path, make: Make) -> None:
    runner = await make("bad_policy:Bad", {"how": "spins"}, deadline_s=1.0)
    asked = asyncio.create_task(runner.decide(make_snapshot()))
    gaps, last_s = [], time.monotonic()
    while not asked.done():
        await asyncio.sleep(0.01)
        gaps.append(time.monotonic() - last_s)
        last_s = time.monotonic()
    assert len(gaps) > 10
    assert max(gaps) < 0.5


async def test_close_ends_a_hung_policy_at_once(bad: Path, make: Make) -> None:
    runner = await make("bad_policy:Bad", {"how": "sleeps"}, deadline_s=60.0)
    assert runner._process is not None
    pid = runner._process.pid
    asked = asyncio.create_task(runner.decide(make_snapshot()))
    await asyncio.sleep(0.2)
    started_s = time.monotonic()
    await runner.close()
    assert time.monotonic() - started_s < 5
    assert await asked is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("no_such_policy", {}, r"policy\.name: unknown policy"),
        ("static_split", {"cap": 0}, r"policy\.settings\.cap"),
        ("explodes:Policy", {}, r"policy\.name: loading failed: ZeroDivisionError"),
        ("quits:Policy", {}, r"policy\.name: quits:Policy did not start: the process exited, code 4"),
    ],
)
async def test_a_policy_that_cannot_be_loaded_refuses_to_start(
    name: str, settings: dict[str, Any], text: str, bad: Path, make: Make
) -> None:
    (bad / "explodes.py").write_text("1 / 0\n")
    (bad / "quits.py").write_text("raise SystemExit(4)\n")
    with pytest.raises(ConfigurationError, match=text):
        await make(name, settings)


async def test_a_policy_installed_elsewhere_is_loaded_by_entry_point(bad: Path, make: Make) -> None:
    info = bad / "bad_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[wisp.policies]\nby_entry_point = bad_policy:Bad\n")
    (bad / "calm").touch()
    runner = await make("by_entry_point", {"how": "raises"})
    decision = await runner.decide(make_snapshot())
    assert decision is not None
    assert decision.reason == "calm 0"


def test_the_child_ends_with_its_parent_also_while_the_policy_hangs(bad: Path) -> None:
    process = PolicyProcess(PolicySpec(name="bad_policy:Bad", settings={"how": "spins"}))
    process._socket.settimeout(5)
    process._socket.sendall(make_snapshot().model_dump_json().encode() + b"\n")
    time.sleep(0.2)
    assert process.is_alive
    process._socket.close()  # what the kernel does when the parent is killed
    assert process._process.wait(5) == 0


def test_a_snapshot_larger_than_any_socket_buffer_passes(bad: Path) -> None:
    (bad / "calm").touch()
    process = PolicyProcess(PolicySpec(name="bad_policy:Bad", settings={"how": "raises"}))
    try:
        assert process.ask(make_snapshot(model="m" * 1_000_000), 30.0).reason == "calm 0"
    finally:
        process.kill()


def test_a_killed_process_answers_nothing_more(bad: Path) -> None:
    process = PolicyProcess(PolicySpec(name="mv_wsa"))
    process.kill()
    process.kill()
    with pytest.raises(PolicyFaultError) as caught:
        process.ask(make_snapshot(budget_bytes=42 * PAGE), 1.0)
    assert caught.value.fault is Fault.EXITED
