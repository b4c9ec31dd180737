"""Prompts are put off only for prompts that the step can compute: nobody waits for a turn that cannot start."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

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


def test_a_turn_refused_by_its_share_keeps_its_place_before_later_ones_of_its_tenant() -> None:
    scheduler = busy_b()
    for number in range(2):
        scheduler.come(f"b-{number}", share=0.25, blocks=60)
    scheduler.come("a")
    scheduler.step("a")
    assert [request.request_id for request in scheduler.waiting if request.request_id[0] == "b"] == ["b-0", "b-1"]
