"""Prompts are put off only for prompts that the step can compute: nobody waits for a turn that cannot start."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from wisp_core.engine.fair_share import JOIN_S
from wisp_core.engine.fair_turns import FairTurns

BLOCK_TOKENS, POOL_BLOCKS, PLACES = 16, 400, 4
BUSY_STEPS, STEP_S = 20, 0.05


class Scheduler:
    """What `FairTurns` sees of vLLM's scheduler; which turns a step computes is each test's to say."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()
        self.running: list[Any] = []
        self.current_step, self.max_num_running_reqs = 0, PLACES
        self.max_model_len, self.block_size = 4096, BLOCK_TOKENS
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=POOL_BLOCKS + 1))
        self.turns = FairTurns(self)

    def come(self, name: str, *, blocks: int = 1, share: float = 1.0, is_running: bool = False) -> Any:
        """A turn of the tenant that ``name`` begins with; one that runs has its prompt computed."""
        extra_args = {"wisp_session": f"{name[0]}/user/session", "wisp_kv_share": share}
        request = SimpleNamespace(
            request_id=name,
            sampling_params=SimpleNamespace(extra_args=extra_args),
            num_prompt_tokens=blocks * BLOCK_TOKENS,
            max_tokens=0,
            structured_output_request=None,
            is_prefill_chunk=False,
            next_decode_eligible_step=0,
        )
        self.turns.add(request)
        (self.running if is_running else self.waiting).append(request)
        return request

    def step(self, *refused: str) -> set[str]:
        """Decide one step, in which vLLM cannot take the waiting turns ``refused``; who may be computed in it.

        Steps that measure what one tenant takes alone come before it: no prompt belongs in them.
        """
        hidden = self.turns.hide()
        is_trial = self.turns._share.is_trial
        self.current_step += 1
        runs = {r.request_id for r in self.running if self.current_step >= r.next_decode_eligible_step}
        # A turn that is shown stays where it is, so that the next step decides the same again.
        shown = {r.request_id for r in self.waiting}
        parts = dict.fromkeys(runs | shown.difference(refused), 1)
        self.turns.unhide(hidden, SimpleNamespace(num_scheduled_tokens=parts))
        if parts:
            self.turns.note_step(STEP_S)
        return self.step(*refused) if is_trial else runs | shown

    def leave(self, request: Any) -> None:
        self.running.remove(request)
        self.turns.remove(request)


def busy_b() -> Scheduler:
    """A scheduler in which tenant b decodes and has used more than `JOIN_S` lately."""
    scheduler = Scheduler()
    scheduler.come("b-old", is_running=True)
    for _ in range(BUSY_STEPS):
        scheduler.step()
    assert BUSY_STEPS * STEP_S > 2 * JOIN_S
    return scheduler


def test_a_prompt_that_can_start_goes_before_those_of_who_used_more() -> None:
    scheduler = busy_b()
    scheduler.come("b")
    scheduler.come("a")
    assert scheduler.step() == {"b-old", "a"}


def test_a_turn_for_which_its_tenant_s_share_has_no_room_is_not_waited_for() -> None:
    scheduler = busy_b()
    running = scheduler.come("a-old", blocks=94, share=0.25, is_running=True)
    scheduler.come("a", blocks=94, share=0.25)
    scheduler.come("b")
    assert scheduler.step() == {"b-old", "a-old", "b"}
    scheduler.leave(running)
    assert scheduler.step() == {"b-old", "a"}, "and once there is room, it is"


def test_nobody_waits_for_a_turn_while_the_batch_is_full() -> None:
    scheduler = busy_b()
    others = [scheduler.come(f"b-{number}", is_running=True) for number in range(PLACES - 1)]
    others[0].is_prefill_chunk = True
    scheduler.come("a")
    assert "b-0" in scheduler.step("a")
    scheduler.leave(others[1])
    assert "b-0" not in scheduler.step(), "and once there is a place, its prompt goes first"


def test_nobody_waits_for_a_turn_whose_grammar_is_still_compiled() -> None:
    scheduler = busy_b()
    blocked = scheduler.come("a")
    blocked.structured_output_request = SimpleNamespace(grammar=None)
    scheduler.come("b")
    assert "b" in scheduler.step("a")
    blocked.structured_output_request.grammar = "compiled"
    assert "b" not in scheduler.step()


def test_a_turn_that_vllm_refuses_for_another_reason_costs_others_every_second_step_at_most() -> None:
    scheduler = busy_b()
    chunk = scheduler.come("b-long", is_running=True)
    chunk.is_prefill_chunk = True
    scheduler.come("a")
    computed = ["b-long" in scheduler.step("a") for _ in range(8)]
    assert computed == [False, True] * 4


def test_no_prompt_joins_a_step_that_measures_what_one_tenant_takes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = busy_b()
    scheduler.come("a-old", is_running=True)
    scheduler.come("b")
    share = scheduler.turns._share

    def measure_b(active: Any, now_s: float) -> frozenset[str]:
        share.is_trial = True
        return frozenset({"a"})

    monkeypatch.setattr(share, "held", measure_b)
    for passed_over in (None, "b"):
        scheduler.turns._passed_over = passed_over
        hidden = scheduler.turns.hide()
        assert [request.request_id for request in hidden] == ["b"]
        scheduler.turns.unhide(hidden, SimpleNamespace(num_scheduled_tokens={"b-old": 1}))


def test_who_used_least_gets_the_blocks_that_come_free_however_many_short_turns_others_have_waiting() -> None:
    """As vLLM does it: in the queue's order, and behind a turn for which there are too few blocks none starts."""
    scheduler, numbers = Scheduler(), iter(range(10_000))
    scheduler.max_num_running_reqs = 64
    needs: dict[str, int] = {}

    def step() -> None:
        while sum(request.request_id[0] == "b" for request in scheduler.waiting) < 3:
            name = f"b{next(numbers)}"
            needs[name] = 10
            scheduler.come(name, blocks=10)
        hidden = scheduler.turns.hide()
        scheduler.current_step += 1
        runs = [r for r in scheduler.running if scheduler.current_step >= r.next_decode_eligible_step]
        parts = {request.request_id: 1 for request in runs}
        free = POOL_BLOCKS - sum(needs[request.request_id] for request in scheduler.running)
        while scheduler.waiting and needs[scheduler.waiting[0].request_id] <= free:
            request = scheduler.waiting.popleft()
            free -= needs[request.request_id]
            scheduler.running.append(request)
            parts[request.request_id] = 16 * needs[request.request_id]
        scheduler.turns.unhide(hidden, SimpleNamespace(num_scheduled_tokens=parts))
        if parts:
            scheduler.turns.note_step(STEP_S)
        if runs:
            scheduler.leave(runs[0])  # one turn ends with each step, and its blocks come free

    for _ in range(60):
        step()
    assert sum(needs[request.request_id] for request in scheduler.running) > 0.9 * POOL_BLOCKS
    needs["a"] = 300
    scheduler.come("a", blocks=300)
    steps = 0
    while all(request.request_id != "a" for request in scheduler.running):
        step()
        steps += 1
        assert steps <= 300 // 10 + 10, "no more than it takes that so many blocks come free"


def test_a_turn_refused_by_its_share_keeps_its_place_before_later_ones_of_its_tenant() -> None:
    scheduler = busy_b()
    for number in range(2):
        scheduler.come(f"b-{number}", share=0.25, blocks=60)
    scheduler.come("a")
    scheduler.step("a")
    assert [request.request_id for request in scheduler.waiting if request.request_id[0] == "b"] == ["b-0", "b-1"]
