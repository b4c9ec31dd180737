from __future__ import annotations

import pytest
from policy_snapshots import PAGE, make_snapshot, wants_kv

from policies.damping import Damped, Damping
from policies.static_split import StaticSplit
from wisp_core.contracts import KvDemand, Split
from wisp_core.errors import ConfigurationError


def test_without_settings_it_keeps_what_the_replica_started_with() -> None:
    snapshot = wants_kv()
    decision, _ = StaticSplit().decide(snapshot, None)
    assert decision.split == snapshot.split
    assert decision.reason.startswith("hold")


def test_without_settings_it_comes_back_after_the_floor_had_it_moved() -> None:
    damped = Damped(policy=StaticSplit(), damping=Damping(confirmations=1))
    calm, state = make_snapshot(), damped.initial_state()
    _, state = damped.decide(calm, state)
    crowded = calm.model_copy(update={"kv": KvDemand(floor_blocks=110)})
    moved, state = damped.decide(crowded, state)
    assert moved.split == Split(cap=3, kv_blocks=119)
    stays, state = damped.decide(crowded.model_copy(update={"split": moved.split}), state)
    assert stays.split == moved.split
    assert stays.reason == "static split: cap 4, clamped to 3"
    back, _ = damped.decide(calm.model_copy(update={"split": moved.split}), state)
    assert back.split == calm.split


def test_a_cap_is_kept_whatever_the_work_wants() -> None:
    policy = StaticSplit(cap=6)
    assert policy.decide(make_snapshot(), None)[0].split == Split(cap=6, kv_blocks=71)
    assert policy.decide(wants_kv(), None)[0].split == Split(cap=6, kv_blocks=71)


@pytest.mark.parametrize(("fraction", "cap"), [(0.0, 2), (0.37, 3), (0.4, 4), (0.5, 5), (1.0, 8)])
def test_a_fraction_is_the_most_that_experts_get(fraction: float, cap: int) -> None:
    split = StaticSplit(fraction=fraction).decide(make_snapshot(), None)[0].split
    assert split.cap == cap
    assert make_snapshot().layout.pool_bytes(split) <= 42 * PAGE


def test_a_cap_that_would_starve_the_floor_is_clamped_and_says_so() -> None:
    snapshot = make_snapshot(kv=KvDemand(floor_blocks=80))
    decision, _ = StaticSplit(cap=8).decide(snapshot, None)
    assert decision.split == Split(cap=5, kv_blocks=87)
    assert "clamped to 5" in decision.reason


def test_nothing_feasible_is_a_hold_with_the_numbers() -> None:
    snapshot = make_snapshot(budget_bytes=9 * PAGE)
    decision, _ = StaticSplit(cap=4).decide(snapshot, None)
    assert decision.split == snapshot.split
    assert str(9 * PAGE) in decision.reason


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cap": 4, "fraction": 0.5}, "exclude each other"),
        ({"cap": 0}, r"policy\.settings\.cap"),
        ({"fraction": 1.5}, r"policy\.settings\.fraction"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        StaticSplit(**settings)
