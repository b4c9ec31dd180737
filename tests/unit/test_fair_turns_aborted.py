"""Turns come and go while steps are on their way, and wait for room in the order in which they came."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from wisp_core.engine.fair_turns import FairTurns


def turn(name: str, tenant: str, weight: float = 1.0) -> Any:
    sampling = SimpleNamespace(extra_args={"wisp_session": f"{tenant}/user/session", "wisp_weight": weight})
    return SimpleNamespace(request_id=name, sampling_params=sampling)


def step_of(*names: str) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


def test_a_tenant_whose_only_turn_is_aborted_while_its_step_is_computed_is_still_charged() -> None:
    turns = FairTurns(SimpleNamespace(waiting=[]))
    first = turn("1", "acme")
    turns.add(first)
    turns.unhide([], step_of("1"))
    turns.remove(first)
    turns.note_step(0.01)
    other = turn("2", "globex")
    turns.add(other)
    turns.unhide([], step_of("2"))
    turns.note_step(0.01)
    turns.remove(other)


def test_an_aborted_turn_of_two_tenants_leaves_the_others_step_to_be_told() -> None:
    turns = FairTurns(SimpleNamespace(waiting=[]))
    one, two = turn("1", "acme"), turn("2", "globex")
    turns.add(one)
    turns.add(two)
    turns.unhide([], step_of("1", "2"))
    turns.remove(one)
    turns.remove(two)
    turns.note_step(0.01)


def test_a_new_weight_counts_from_the_next_turn_also_of_a_tenant_that_is_busy() -> None:
    turns = FairTurns(SimpleNamespace(waiting=[]))
    turns.add(turn("1", "acme"))
    turns.add(turn("2", "globex"))
    turns.add(turn("3", "acme", weight=4.0))
    turns.unhide([], step_of("1", "2"))
    turns.note_step(0.01)
    acme, globex = (turns._share.used_s(tenant) for tenant in ("acme", "globex"))
    assert acme == pytest.approx(globex / 4)


def test_a_long_turn_of_a_bounded_tenant_starts_before_shorter_ones_that_came_later() -> None:
    pool = SimpleNamespace(num_gpu_blocks=101)  # half of it is the tenant's
    scheduler = SimpleNamespace(
        waiting=deque(),
        running=[],
        current_step=0,
        max_model_len=10**6,
        block_size=16,
        max_num_running_reqs=64,
        kv_cache_manager=SimpleNamespace(block_pool=pool),
    )
    turns, started = FairTurns(scheduler), list[str]()

    def come(name: str, num_blocks: int) -> None:
        request = turn(name, "bounded")
        request.sampling_params.extra_args["wisp_kv_share"] = 0.5
        request.num_prompt_tokens, request.max_tokens, request.is_prefill_chunk = 16 * num_blocks, 0, False
        request.structured_output_request = None
        turns.add(request)
        scheduler.waiting.append(request)

    come("first", 30)
    come("long", 40)
    for number in range(10):  # one short turn comes with each step, and one turn ends while others run
        come(str(number), 15)
        hidden = turns.hide()
        started += [request.request_id for request in scheduler.waiting]
        output = step_of(*[request.request_id for request in scheduler.waiting])
        scheduler.running += scheduler.waiting
        scheduler.waiting.clear()
        turns.unhide(hidden, output)
        if output.num_scheduled_tokens:
            turns.note_step(0.01)
        turns.remove(scheduler.running.pop(0))
    assert started[:2] == ["first", "long"]
