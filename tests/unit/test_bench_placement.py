"""The benchmarks of placement: small runs of what needs no engine, and what their figures add up to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.bench.cli import main
from loadtests.placement import co_schedule, live, overhead, routing, simulated, working_sets
from loadtests.placement.routing import DecisionsConfig
from loadtests.placement.simulated import SimulatedConfig
from loadtests.report import Measured, write_result
from services.config import RouterName


def quiet(_: str) -> None:
    """Progress goes nowhere."""


def test_decisions_are_timed_and_compared_with_scoring_everything() -> None:
    config = DecisionsConfig(
        num_replicas=12,
        num_sessions=50,
        num_layers=3,
        num_experts=16,
        top_k=2,
        cap=4,
        num_topics=4,
        decisions=20,
        regret_samples=20,
    )
    rows = routing.measure(config, quiet)
    summary = routing.summarize(rows)
    assert [row["kind"] for row in rows] == ["unplaced", "placed", "regret"]
    assert 0 < summary["decision_p50_us"] <= summary["decision_p99_us"]
    assert 0 <= summary["regret_mean"] <= summary["regret_max"]


def test_with_few_replicas_nothing_is_missed() -> None:
    config = DecisionsConfig(
        num_replicas=4, num_sessions=50, num_layers=3, num_experts=16, top_k=2, cap=4, num_topics=4, decisions=5
    )
    assert routing.summarize(routing.measure(config, quiet))["regret_max"] == pytest.approx(0.0, abs=1e-6)


def test_simulated_topics_gather_and_nothing_else_changes() -> None:
    config = replace(SimulatedConfig(), num_turns=400, zipf_exponents=(2.0,), seeds=(0,))
    rows = simulated.measure(config, quiet)
    summary = simulated.summarize(rows)
    assert {row["turns"] for row in rows} == {400}
    assert summary["miss_vs_pow2"] < 0.75
    assert summary["miss_vs_hash"] < 0.85
    assert summary["p95_turn_vs_pow2"] < 1.0
    assert list(summary["by_work"]) == ["topics, zipf 2", "shuffled topics", "equal topics", "unseen topics"]
    assert summary["by_work"]["equal topics"]["mean_turn_vs_pow2"] < 1.15


def live_row(router: str, work: str, factor: float, seed: int = 0) -> dict[str, object]:
    keys = ("decode_missed_bytes_per_token", "missed_bytes_per_token", "turn_p95_s", "turn_mean_s")
    return {"router": router, "work": work, "seed": seed, "failed_turns": 1, **dict.fromkeys(keys, factor)}


def test_routers_that_are_compared_keep_nothing_of_each_other(tmp_path: Path) -> None:
    services = [live._service_config(live.LiveConfig(), tmp_path, router) for router in RouterName]
    assert [one.routing.router for one in services] == list(RouterName)
    assert len({one.state_dir for one in services}) == len(services)
    assert {one.model.path for one in services} == {str(tmp_path / "model")}


def test_live_ratios_are_of_seeds_that_both_have() -> None:
    rows = [live_row(RouterName.WORKING_SET, "topics", value, seed) for seed, value in enumerate((1.0, 3.0, 100.0))]
    rows += [live_row(RouterName.POWER_OF_TWO, "topics", value, seed) for seed, value in enumerate((2.0, 3.0))]
    summary = live.summarize(rows)
    assert (summary["miss_vs_pow2"], summary["miss_vs_pow2_worst_seed"]) == (0.8, 1.0)


def test_rows_of_several_live_runs_are_joined(tmp_path: Path) -> None:
    config = live.LiveConfig()
    for seed, router in enumerate(("working_set", "working_set", "power_of_two")):
        measured = Measured(rows=[live_row(router, "topics", 2.0, seed)])
        write_result(tmp_path / f"{seed}.json", config, measured, {})
    parts = [word for seed in range(3) for word in ("--merge", str(tmp_path / f"{seed}.json"))]
    with pytest.raises(SystemExit):
        main(["placement", "--live", *parts, "--output", str(tmp_path / "all.json")])
    joined = json.loads((tmp_path / "all.json").read_text())
    assert [(row["router"], row["seed"]) for row in joined["rows"]] == [
        ("working_set", 0),
        ("working_set", 1),
        ("power_of_two", 2),
    ]
    assert joined["summary"]["failed_turns"] == 3


def test_live_ratios_are_of_the_same_work() -> None:
    rows = [
        live_row(RouterName.WORKING_SET, "topics", 1.0),
        live_row(RouterName.POWER_OF_TWO, "topics", 2.0),
        live_row(RouterName.WORKING_SET, "shuffled", 3.0),
        live_row(RouterName.CONSISTENT_HASH, "shuffled", 4.0),
    ]
    summary = live.summarize(rows)
    assert (summary["miss_vs_pow2"], summary["shuffled_p95_turn_vs_hash"], summary["failed_turns"]) == (0.5, 0.75, 4)
    assert "miss_vs_hash" not in summary


@pytest.mark.parametrize(("service_ms", "is_within"), [(13.4, True), (13.6, False)])
def test_overhead_may_be_serve_s_own_part_and_one_millisecond(service_ms: float, is_within: bool) -> None:
    medians = {
        "direct": 5.0,
        "direct_stream": 5.0,
        "service": service_ms,
        "service_stream": 20.0,
        "serve": 9.0,
        "echo": 1.5,
    }
    summary = overhead.summarize([{"path": path, "p50_ms": value} for path, value in medians.items()])
    assert summary["limit_ms"] == 8.5
    assert summary["is_within_limit"] is is_within


def test_gated_turns_are_compared_by_cap_and_link() -> None:
    values = ((20, "fcfs", 2.0), (20, "gated", 1.0), (32, "fcfs", 4.0), (32, "gated", 3.0))
    rows = [
        {"cap": cap, "link_bytes_per_s": 25e6, "way": way, **dict.fromkeys(co_schedule._COMPARED, value)}
        for cap, way, value in values
    ]
    summary = co_schedule.summarize(rows)
    assert summary["cap_20_link_25_mb_per_s"]["makespan_s"] == 0.5
    assert summary["cap_32_link_25_mb_per_s"]["gap_max_s"] == 0.75


def test_what_is_foretold_and_what_it_costs_is_summed_up() -> None:
    rows = [
        {"kind": "foretold", "stage": stage, "error": error}
        for stage, errors in zip(
            working_sets.STAGES, ((0.9, 0.7), (0.6, 0.6), (0.4, 0.4), (0.3, 0.3), (0.1, 0.3)), strict=True
        )
        for error in errors
    ]
    rows += [{"kind": "safe_size", "miss_share": share} for share in (0.05, 0.09)]
    rows += [{"kind": "cost", "share_of_step": share} for share in (0.004, 0.002)]
    summary = working_sets.summarize(rows)
    assert (summary["error_nothing"], summary["error_first_tokens"]) == (0.8, 0.2)
    assert (summary["safe_miss_share_max"], summary["signature_share_of_step"]) == (0.09, 0.004)
