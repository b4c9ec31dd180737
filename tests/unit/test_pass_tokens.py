"""Tokens of a prefill pass: as many as pay for their memory, inside the budget, the same in plan and engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.shapes import SHAPES, config_of
from wisp_core.errors import ConfigurationError
from wisp_core.planner.cards import H200, card_like, find_card
from wisp_core.planner.chunk import GOOD_ENOUGH
from wisp_core.planner.engine_pass import choose_for_engine
from wisp_core.planner.model_shape import read_shape
from wisp_core.planner.plan import PlanRequest, choose_pass, make_plan
from wisp_core.settings import WispSettings

QWEN = read_shape(config_of(SHAPES["qwen3-30b-a3b"]), name="qwen3-30b-a3b")
GB = 10**9
ARGUMENTS = {"max_model_len": 32768, "max_num_seqs": 8}


def request(**changes: Any) -> PlanRequest:
    fields: dict[str, Any] = {"shape": QWEN, "card": H200, "concurrency": 8, "max_model_len": 8192}
    return PlanRequest(**(fields | {"budget_bytes": 24 * GB} | changes))


@pytest.mark.parametrize("budget_gb", [12, 16, 24, 48])
def test_the_chosen_pass_is_nearly_the_best_and_inside_the_budget(budget_gb: int) -> None:
    found = choose_pass(request(budget_bytes=budget_gb * GB))
    assert found.chosen.turn_s <= GOOD_ENOUGH * min(option.turn_s for option in found.options)
    assert all(
        o.turn_s > GOOD_ENOUGH * min(p.turn_s for p in found.options)
        for o in found.options[found.options.index(found.chosen) + 1 :]
    )
    for option in found.options:
        assert option.other_bytes + option.layout.experts_bytes_by_cap[option.cap] <= budget_gb * GB
    ascending = [option.other_bytes for option in found.options]
    assert ascending == sorted(set(ascending)), "a larger pass has larger activations"


def test_long_contexts_ask_for_larger_passes() -> None:
    short = choose_pass(request(max_model_len=2048, budget_bytes=48 * GB)).chosen.tokens
    long = choose_pass(request(max_model_len=40960, budget_bytes=48 * GB)).chosen.tokens
    assert short <= 2048 < long


def test_a_plan_takes_the_same_pass_and_a_given_one_wins() -> None:
    asked = request(card=find_card("rtx-3090"), concurrency=4, max_model_len=32768)
    assert make_plan(asked).choice.max_num_batched_tokens == choose_pass(asked).chosen.tokens
    given = request(card=find_card("rtx-3090"), concurrency=4, max_model_len=32768, chunk_tokens=1024)
    assert make_plan(given).choice.max_num_batched_tokens == 1024


def test_short_contexts_have_a_workload_too() -> None:
    assert all(
        choose_pass(request(max_model_len=tokens)).chosen.tokens == max(tokens, 256) for tokens in (64, 512, 1024)
    )


def test_a_budget_without_room_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="more"):
        choose_pass(request(budget_bytes=6 * GB))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config_of(SHAPES["qwen3-30b-a3b"])))
    return str(tmp_path)


def of_budget(budget_gb: int, **settings: int) -> WispSettings:
    return WispSettings(vram_budget_bytes=budget_gb * GB, **settings)


def test_fewer_turns_are_planned_for_where_not_all_fit(model: str) -> None:
    tight = choose_for_engine(model, {"max_model_len": 8192, "max_num_seqs": 1024}, of_budget(11), H200)
    assert tight.chosen.choice.max_num_seqs < 16
    with pytest.raises(ConfigurationError):
        choose_for_engine(model, {"max_model_len": 8192}, of_budget(6), H200)


def test_an_engine_s_settings_bound_its_pass(model: str) -> None:
    free = choose_for_engine(model, ARGUMENTS, of_budget(40), H200)
    smallest = free.options[0]
    assert free.chosen.tokens > smallest.tokens
    told = choose_for_engine(model, ARGUMENTS, of_budget(40, other_bytes=smallest.other_bytes), H200)
    assert [option.tokens for option in told.options] == [smallest.tokens], "a larger one would be refused at the start"
    roomy = choose_for_engine(model, ARGUMENTS, of_budget(40, other_bytes=20 * GB), H200)
    assert {option.pooled_bytes for option in roomy.options} == {20 * GB}, "what is set apart is not there for slots"
    with pytest.raises(ConfigurationError, match=f"other_bytes is {GB}, and passes of 1024 tokens may need"):
        choose_for_engine(model, ARGUMENTS, of_budget(40, other_bytes=GB), H200)


@pytest.mark.parametrize(
    ("settings", "more_bytes"), [({"staging_bytes": 2 << 30}, 7 << 28), ({"activation_bytes": 3 << 30}, 2 << 30)]
)
def test_what_an_engine_sets_apart_is_not_there_for_its_slots(
    model: str, settings: dict[str, int], more_bytes: int
) -> None:
    plain, found = (
        choose_for_engine(model, ARGUMENTS, of_budget(24, **more), H200).options[0] for more in ({}, settings)
    )
    assert found.other_bytes == plain.other_bytes + more_bytes


def test_an_engine_s_smallest_cap_bounds_its_slots(model: str) -> None:
    assert choose_for_engine(model, ARGUMENTS, of_budget(40, min_cap=40), H200).chosen.layout.min_cap == 40


def test_an_unknown_card_is_taken_for_the_one_of_its_size() -> None:
    assert card_like("NVIDIA GeForce RTX 9999", 24 * GB).memory_bytes == pytest.approx(24 * GB, rel=0.1)
    assert card_like("NVIDIA H200", 1) is H200
