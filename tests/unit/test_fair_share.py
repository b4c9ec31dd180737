"""Shares of engine time: what is promised to a tenant holds whatever the others do, and costs nobody for nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from wisp_core.engine.fair_share import MAX_AHEAD_S, STEPS_PER_TRIAL, FairShare, StepPart

DECODE = StepPart(decode_tokens=1)
StepSeconds = Callable[[Mapping[str, StepPart]], float]


class Engine:
    """Steps whose time is known, of tenants that always have the same work."""

    def __init__(
        self, work: dict[str, StepPart], seconds: StepSeconds, weights: dict[str, float] | None = None
    ) -> None:
        self.share = FairShare()
        self.work = work
        self.now_s = 100.0
        self.steps: dict[str, int] = dict.fromkeys(work, 0)
        self._seconds = seconds
        self._weights = weights or {}

    def begin(self, *tenants: str) -> None:
        for tenant in tenants:
            self.share.begin(tenant, self._weights.get(tenant, 1.0))

    def run(self, num_steps: int, *active: str) -> float:
        """Mean seconds from one step of the first tenant to its next."""
        began_s, began_steps = self.now_s, self.steps[active[0]]
        for _ in range(num_steps):
            held = self.share.held(active, self.now_s)
            assert held < set(active), "a step needs somebody"
            parts = {tenant: self.work[tenant] for tenant in active if tenant not in held}
            seconds = self._seconds(parts)
            self.now_s += seconds
            self.share.note_step(parts, held, active, seconds, self.now_s)
            for tenant in parts:
                self.steps[tenant] += 1
        return (self.now_s - began_s) / max(1, self.steps[active[0]] - began_steps)


def thrashing(parts: Mapping[str, StepPart]) -> float:
    """Seven milliseconds for anybody; A's experts have to be copied every time."""
    return 0.007 + (0.019 if "a" in parts else 0.0)


@pytest.mark.parametrize(("weight", "promised"), [(1.0, 0.5), (4.0, 0.8), (9.0, 0.9)])
def test_a_tenant_that_thrashes_slows_others_to_their_share_at_most(weight: float, promised: float) -> None:
    engine = Engine({"a": DECODE, "b": DECODE}, thrashing, {"b": weight})
    engine.begin("a", "b")
    engine.run(500, "b", "a")
    assert engine.run(2000, "b", "a") <= 1.03 * 0.007 / promised
    assert engine.steps["a"] > 0


def test_the_one_who_thrashes_gets_its_share_too() -> None:
    engine = Engine({"a": DECODE, "b": DECODE}, thrashing)
    engine.begin("a", "b")
    engine.run(500, "b", "a")
    assert engine.run(2000, "a", "b") <= 1.1 * 0.026 / 0.5


def test_tenants_whose_steps_fit_together_are_never_held_but_to_measure() -> None:
    engine = Engine(dict.fromkeys("abcd", DECODE), lambda parts: 0.006 + 0.001 * len(parts))
    engine.begin(*"abcd")
    engine.run(200, *"abcd")
    before = dict(engine.steps)
    engine.run(STEPS_PER_TRIAL * 30, *"abcd")
    for tenant, steps in engine.steps.items():
        assert steps - before[tenant] >= STEPS_PER_TRIAL * 30 - 30


def test_a_cheap_tenant_is_not_held_for_a_dear_one() -> None:
    engine = Engine({"a": DECODE, "b": DECODE, "c": DECODE}, thrashing, {"b": 4.0, "c": 4.0})
    engine.begin("a", "b", "c")
    engine.run(500, "b", "a", "c")
    assert engine.run(2000, "c", "a", "b") <= 1.05 * engine.run(2000, "b", "a", "c")


def test_a_long_prefill_of_somebody_is_made_good() -> None:
    work = {"a": StepPart(prefill_tokens=64), "b": DECODE}
    engine = Engine(work, lambda parts: 0.2 if "a" in parts else 0.007, {"b": 4.0})
    engine.begin("a", "b")
    assert engine.run(3000, "b", "a") <= 1.05 * 0.007 / 0.8


def test_alone_nobody_is_held() -> None:
    engine = Engine({"a": DECODE}, lambda parts: 0.007)
    engine.begin("a")
    for _ in range(200):
        assert engine.share.held(["a"], engine.now_s) == frozenset()
        engine.run(1, "a")


def test_nobody_is_held_for_a_tenant_that_cannot_run() -> None:
    engine = Engine({"a": DECODE}, lambda parts: 0.026)
    engine.begin("a", "waits for a grammar")
    active = ("a", "waits for a grammar")
    for _ in range(300):
        held = engine.share.held(active, engine.now_s)
        assert "a" not in held
        engine.now_s += 0.026
        engine.share.note_step({"a": DECODE}, held, active, 0.026, engine.now_s)


def test_waiting_turns_go_in_the_order_of_recent_use_by_weight() -> None:
    engine = Engine({"a": DECODE, "b": DECODE}, thrashing)
    engine.begin("a")
    engine.run(100, "a")
    engine.begin("b")
    assert engine.share.used_s("b") < engine.share.used_s("a")
    assert not engine.share.may_join("a", "b")
    assert engine.share.may_join("b", "b")
    engine.run(1, "b")
    for _ in range(30):
        engine.now_s += 5
        engine.run(1, "b")
    assert engine.share.may_join("a", "b"), "what was long ago counts no more"


def test_what_is_owed_outlasts_a_pause_between_turns_and_credit_is_bounded() -> None:
    engine = Engine({"a": DECODE, "b": DECODE}, thrashing)
    engine.begin("a", "b")
    engine.run(301, "b", "a")
    owed_s = engine.share._tenants["a"].ahead_s
    engine.begin("a")
    assert engine.share._tenants["a"].ahead_s == owed_s
    alone = Engine({"a": DECODE, "b": DECODE}, lambda parts: 0.01)
    alone.begin("a", "b")
    alone.run(2000, "a", "b")
    assert alone.share._tenants["a"].ahead_s <= MAX_AHEAD_S


def test_a_step_that_measures_is_said_to_be_one() -> None:
    engine = Engine({"a": DECODE, "b": DECODE}, lambda parts: 0.01)
    engine.begin("a", "b")
    trials = 0
    for _ in range(20):
        engine.run(1, "a", "b")
        trials += engine.share.is_trial
    assert trials == 2, "one for each"


def test_idle_tenants_are_forgotten_once_their_use_has_decayed() -> None:
    engine = Engine({"a": DECODE, "b": DECODE}, lambda parts: 0.01)
    engine.begin("a", "b")
    engine.run(10, "a", "b")
    engine.share.forget_idle({"a"})
    assert engine.share.used_s("b") > 0
    engine.now_s += 200
    engine.run(1, "a")
    engine.share.forget_idle({"a"})
    assert set(engine.share._tenants) == {"a"}
