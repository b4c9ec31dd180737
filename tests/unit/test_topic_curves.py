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
from wisp_core.simulator.topic_curves import TopicCurves
from wisp_core.simulator.trace import Trace
from wisp_core.simulator.union_ratio import is_warm, union_ratio_by_cap
from wisp_core.working_set.signature import pack

SPLIT = Split(cap=4, kv_blocks=103)
RATES = np.array([[[0.9, 0.7, 0.3, 0.1, 0, 0, 0, 0]] * 2, [[0, 0, 0, 0, 0.1, 0.3, 0.7, 0.9]] * 2], dtype=np.float32)
"""Two topics that share no expert, [topics, L, E]."""
RATIO = np.linspace(1.0, 2.0, 9)


def curves() -> TopicCurves:
    return TopicCurves(RATES, RATIO)


def test_two_topics_together_miss_more_than_one_until_all_fits() -> None:
    some = curves()
    alone, mixed = some.mix({0: 2}), some.mix({0: 1, 1: 1})
    assert some.by_cap(2, mixed)[4] > 2 * some.by_cap(2, alone)[4]
    assert some.by_cap(2, mixed)[8] == some.by_cap(2, alone)[4] == 0.0
    assert np.all(np.diff(some.by_cap(2, mixed)) <= 0)
    assert some.mix({1: 1, 0: 1}) == mixed
    assert some.mix({1: 2}) != alone


def test_misses_are_the_union_s_times_what_was_measured() -> None:
    some = curves()
    mix = some.mix({0: 1})
    needs = 1 - np.exp(-RATES[0, 0])
    assert some.by_cap(1, mix)[2] == pytest.approx(2 * needs[2:].sum() * RATIO[2], rel=1e-5)
    assert some.distinct_experts(1, mix) == pytest.approx(2 * needs.sum(), rel=1e-5)
    assert some.distinct_by_batch(3)[2] == pytest.approx(
        2 * (1 - np.exp(-3 * RATES[:, 0].mean(axis=0))).sum(), rel=1e-5
    )


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
        Signature(key=str(c), num_layers=2, num_experts=8, weights=pack(RATES[c % 2]), decode_tokens=9, lookups=36)
        for c in range(8)
    ]
    return Recording(trace=Trace(played), snapshots=tuple(reporter.seen), signatures=tuple(seen))


def test_a_recording_tells_by_how_much_more_is_missed_than_the_union() -> None:
    recording = recorded((0, 0, 0, 0, 1, 1, 1, 1))
    rates = recording.topic_rates()
    assert rates is not None
    assert rates == pytest.approx(RATES, abs=0.01)
    ratio = union_ratio_by_cap(recording, rates)
    assert ratio[1:7] == pytest.approx(RATIO[1:7], rel=0.1)


def test_an_engine_that_was_calibrated_on_mixed_topics_knows_what_parted_ones_cost() -> None:
    engine = calibrated_engine(recorded((0, 0, 0, 0, 1, 1, 1, 1)), pass_tokens=100)
    parted = recorded((0, 1, 0, 1, 0, 1, 0, 1)).trace
    settings = SimulationSettings(follows_recording=True)
    result = simulate(parted, engine, num_replicas=2, split=SPLIT, settings=settings)
    assert result.latency_s.mean() == pytest.approx(parted.turns["duration_s"].mean(), rel=0.05)


def test_what_fills_the_slots_for_the_first_time_is_no_evidence() -> None:
    snapshot = recorded((0, 0, 0, 0, 1, 1, 1, 1)).snapshots[10]
    assert is_warm(snapshot)
    curve = np.array(snapshot.decode_misses_by_cap) + 0.2
    assert not is_warm(snapshot.model_copy(update={"decode_misses_by_cap": tuple(curve.tolist())}))


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
    assert summarize([fit, judged])["is_order_same"], "work of another name is not ordered"
    with pytest.raises(ConfigurationError, match="no working sets"):
        list(replays(dataclasses.replace(config, judged=(("unknown.jsonl", "static"),)), tmp_path))
