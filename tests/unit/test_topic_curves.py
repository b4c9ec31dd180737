"""Misses by who decodes: the curves themselves, what a recording tells of them, and what routers may know."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from simulator_engines import make_engine, make_trace, make_turn

from loadtests.simulate.replay import ReplayConfig, replays, summarize
from wisp_core.contracts import Decision, ReplicaSnapshot, Signature, Split
from wisp_core.errors import ConfigurationError
from wisp_core.routing.views import RoutingRequest
from wisp_core.simulator.calibration import calibrated_engine
from wisp_core.simulator.recording import Recording, write_recording
from wisp_core.simulator.routers import ClusterView
from wisp_core.simulator.simulation import SimulationSettings, simulate
from wisp_core.simulator.topic_curves import TopicCurves, lru_misses_by_cap
from wisp_core.simulator.trace import Trace
from wisp_core.working_set.signature import pack

SPLIT = Split(cap=4, kv_blocks=103)
RATES = np.array([[[0.9, 0.7, 0.3, 0.1, 0, 0, 0, 0]] * 2, [[0, 0, 0, 0, 0.1, 0.3, 0.7, 0.9]] * 2], dtype=np.float32)
"""Two topics that share no expert, [topics, L, E]."""
PROMPT_RATES = np.array(
    [[[0.6, 0.6, 0.25, 0.25, 0.15, 0.15, 0, 0]] * 2, [[0, 0, 0.15, 0.15, 0.25, 0.25, 0.6, 0.6]] * 2]
)
RATIO = 1.5


def curves() -> TopicCurves:
    return TopicCurves(RATES, ratio=RATIO, prompt_rates=PROMPT_RATES.astype(np.float32))


def test_two_topics_together_miss_more_than_one_until_all_fits() -> None:
    some = curves()
    alone, mixed = some.mix({0: 2}), some.mix({0: 1, 1: 1})
    assert some.by_cap(2, mixed)[4] > 2 * some.by_cap(2, alone)[4]
    assert some.by_cap(2, mixed)[8] == some.by_cap(2, alone)[4] == 0.0
    assert np.all(np.diff(some.by_cap(2, mixed)) <= 0)
    assert some.mix({1: 1, 0: 1}) == mixed
    assert some.mix({1: 2}) != alone


def test_misses_are_those_of_an_lru_list_of_independent_steps() -> None:
    rng = np.random.default_rng(0)
    needs = np.array([0.9, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01])
    recent, steps = list(range(8)), 20_000  # the one used last in front
    missed = np.zeros(9)
    for uses in rng.random((steps, 8)) < needs:
        for expert in np.flatnonzero(uses).tolist():
            missed[: recent.index(expert) + 1] += 1
        for expert in np.flatnonzero(uses).tolist():
            recent.remove(expert)
            recent.insert(0, expert)
    expected = lru_misses_by_cap(needs[None])
    assert expected[0] == pytest.approx(needs.sum())
    assert expected[8] == pytest.approx(0.0, abs=1e-9)
    # Below the experts of one step the simulated list has lost its own last ones, which a pager pins.
    assert expected[4:8] == pytest.approx(missed[4:8] / steps, rel=0.15)


def test_a_step_needs_what_no_row_leaves_alone_and_misses_no_more_than_that() -> None:
    some = curves()
    mix = some.mix({0: 2, 1: 1})
    needs = 1 - (1 - RATES[0, 0]) ** 2 * (1 - RATES[1, 0])
    assert some.distinct_experts(3, mix) == pytest.approx(2 * needs.sum(), rel=1e-5)
    assert some.by_cap(3, mix)[0] == pytest.approx(2 * needs.sum(), rel=1e-5)
    assert some.by_cap(3, mix)[6] == pytest.approx(2 * RATIO * lru_misses_by_cap(needs[None])[6], rel=1e-5)
    assert some.distinct_by_batch(3)[2] == pytest.approx(2 * (1 - (1 - RATES[:, 0].mean(axis=0)) ** 3).sum(), rel=1e-5)


def test_prompts_miss_what_they_need_beyond_the_experts_that_decode_steps_use_most() -> None:
    some = curves()
    needs = 1 - (1 - PROMPT_RATES[0, 0]) ** 3 * (1 - PROMPT_RATES[1, 0]) ** 2
    assert some.missed_by_prompts({0: 3, 1: 2}, 0, 4) == pytest.approx(needs.sum())
    # Experts 0, 1, 6 and 7 are used most.
    assert some.missed_by_prompts({0: 3, 1: 2}, 4, 4) == pytest.approx(needs[2:6].sum())
    assert some.missed_by_prompt(3, 4, 4) == pytest.approx(some.missed_by_prompts({0: 3}, 4, 4)), "both topics alike"
    unknown = TopicCurves(RATES)
    assert unknown.missed_by_prompts({0: 3, 1: 2}, 4, 4) == unknown.missed_by_prompt(5, 4, 4) > 0


class Reporter:
    """A policy that holds, and keeps every snapshot."""

    def __init__(self) -> None:
        self.seen: list[ReplicaSnapshot] = []

    def initial_state(self) -> None:
        return None

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        self.seen.append(snapshot)
        return Decision(split=snapshot.split, reason="hold"), None


def recorded(replicas: tuple[int, ...]) -> Recording:
    """Eight clients, every second on the same topic; ``replicas`` says where each runs."""
    engine = make_engine(curves=curves(), link_bytes_per_s=1e5, step_s=0.05, pass_s=0.1, starts_cold=True)
    turns = [
        make_turn(c, topic=c % 2, think_s=1.0 + 0.1 * c, output_tokens=40 + 10 * i, replica=replicas[c])
        for c in range(8)
        for i in range(6)
    ]
    trace, reporter = make_trace(*turns), Reporter()
    settings = SimulationSettings(epoch_s=5.0, window_s=10.0, follows_recording=True)
    result = simulate(trace, engine, num_replicas=2, split=SPLIT, policy=reporter, settings=settings)
    played = trace.turns.copy()
    played["ttft_s"], played["duration_s"] = result.ttft_s, result.latency_s
    seen = [
        Signature(
            key=str(c),
            num_layers=2,
            num_experts=8,
            weights=pack(RATES[c % 2]),
            decode_tokens=9,
            lookups=36,
            prefill_weights=pack(PROMPT_RATES[c % 2]),
            prefill_tokens=9,
        )
        for c in range(8)
    ]
    return Recording(trace=Trace(played), snapshots=tuple(reporter.seen), signatures=tuple(seen))


def test_a_recording_tells_working_sets_and_by_how_much_more_is_missed() -> None:
    recording = recorded((0, 0, 0, 0, 1, 1, 1, 1))
    rates, prompt_rates = recording.topic_rates(), recording.topic_rates(is_prefill=True)
    assert rates is not None
    assert prompt_rates is not None
    assert rates == pytest.approx(RATES, abs=0.01)
    assert prompt_rates == pytest.approx(PROMPT_RATES, abs=0.01)
    engine = calibrated_engine(recording, pass_tokens=100)
    assert isinstance(engine.curves, TopicCurves)
    assert engine.curves.ratio == pytest.approx(RATIO, rel=0.1)
    assert engine.pass_misses_by_cap is None


def test_an_engine_that_was_calibrated_on_mixed_topics_knows_what_parted_ones_cost() -> None:
    engine = calibrated_engine(recorded((0, 0, 0, 0, 1, 1, 1, 1)), pass_tokens=100)
    parted = recorded((0, 1, 0, 1, 0, 1, 0, 1)).trace
    settings = SimulationSettings(follows_recording=True)
    result = simulate(parted, engine, num_replicas=2, split=SPLIT, settings=settings)
    assert result.latency_s.mean() == pytest.approx(parted.turns["duration_s"].mean(), rel=0.05)


class Asking:
    """A router that keeps what it is told of sessions."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def place(self, request: RoutingRequest, cluster: ClusterView) -> int:
        assert request.uses is not None
        self.rates.append(float(request.uses.rates[0, 0]))
        return 0


def test_routers_learn_a_user_s_working_set_from_the_first_turn() -> None:
    turns = [make_turn(0, user=user, session=user, think_s=1.0) for user in (0, 0, 1)]
    for learns, expected in ((False, [0.9, 0.9, 0.9]), (True, [0.45, 0.9, 0.45])):
        router, settings = Asking(), SimulationSettings(learns_users=learns)
        other = make_turn(1, topic=1, at_s=1e3)
        trace = make_trace(*turns, other)
        simulate(trace, make_engine(), split=SPLIT, router=router, routing=curves(), settings=settings)
        assert router.rates[:3] == pytest.approx(expected)


def test_slots_that_start_empty_are_filled_once_and_help_no_pass_before() -> None:
    turns = [make_turn(0, prompt_tokens=50, output_tokens=2), make_turn(0, prompt_tokens=50, output_tokens=2)]
    warm, cold = (
        simulate(
            make_trace(*turns),
            make_engine(
                curves=curves(),
                link_bytes_per_s=8192.0,
                pass_misses_by_cap=tuple(range(16, -2, -2)),
                starts_cold=starts_cold,
            ),
            split=SPLIT,
        )
        for starts_cold in (False, True)
    )
    later = cold.ended_s - warm.ended_s
    # A copy takes a second: the first pass copies 16 experts instead of 8, and 2 layers of 4 slots are filled.
    assert cold.ttft_s - warm.ttft_s == pytest.approx([8.0, 0.0])
    assert later == pytest.approx([16.0, 16.0])


def test_a_replay_places_turns_itself_and_knows_the_judged_work_s_topics(tmp_path: Path) -> None:
    fitted = recorded((0, 0, 0, 0, 1, 1, 1, 1))
    other = fitted.trace.turns.copy()
    other["topic"] += 1
    strange = dataclasses.replace(fitted, trace=Trace(other, source="strange"))
    unknown = dataclasses.replace(strange, signatures=())
    for name, recording in (("fit", fitted), ("strange", strange), ("unknown", unknown)):
        write_recording(tmp_path / f"{name}.jsonl", recording)
    config = ReplayConfig(fit="fit.jsonl", judged=(("strange.jsonl", "static"),), pass_tokens=100, num_runs=3)
    fit, judged = replays(config, tmp_path)
    assert judged["simulated_turn_s"] == pytest.approx(fit["simulated_turn_s"], rel=0.02), "the same work, renumbered"
    assert 0 < fit["simulated_turn_sd_s"] < 0.1 * fit["simulated_turn_s"]
    assert summarize([fit, judged])["num_ordered_pairs"] == 0, "work of another name is not ordered"
    assert abs(judged["as_placed_off_by"]) < 0.1
    assert fit["simulated"]["pass_tokens"] == pytest.approx(fit["measured"]["pass_tokens"], rel=0.2)
    with pytest.raises(ConfigurationError, match="no working sets"):
        list(replays(dataclasses.replace(config, judged=(("unknown.jsonl", "static"),)), tmp_path))


def test_pairs_that_differ_by_less_than_two_equal_runs_have_no_order() -> None:
    def row(name: str, policy: str, cap: int, measured_s: float, simulated_s: float) -> dict[str, object]:
        turns = {"measured_turn_s": measured_s, "simulated_turn_s": simulated_s, "as_placed_turn_s": measured_s}
        errors = {"off_by": simulated_s / measured_s - 1, "as_placed_off_by": 0.0}
        about = {"recording": name, "work": "w", "policy": policy, "cap": cap, "is_fitted": name == "a"}
        return about | turns | errors

    rows = [row("a", "static", 30, 10.0, 10.0), row("b", "static", 28, 10.2, 9.0), row("c", "mv_wsa", 20, 8.0, 9.5)]
    alone = summarize(rows)
    assert (alone["num_ordered_pairs"], alone["equal_runs_differ_pct"]) == (3, 0.0)
    assert [pair.partition(":")[0] for pair in alone["swapped"]] == ["a, b", "b, c"]
    repeated = summarize([*rows, row("c again", "mv_wsa", 24, 8.4, 9.5)])
    assert repeated["equal_runs_differ_pct"] == pytest.approx(100 * (1 - 8.0 / 8.4))
    assert repeated["too_close"] == ["a, b: 2.0%"]
    assert [pair.partition(":")[0] for pair in repeated["swapped"]] == ["b, c", "b, c again"]
    assert not repeated["is_order_same"]
    assert repeated["is_order_same_as_placed"]
