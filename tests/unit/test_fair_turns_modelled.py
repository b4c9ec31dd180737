"""Turns of a quiet tenant beside one that floods and one that thrashes, on a model of vLLM's scheduler and of steps.

The model does what vLLM's scheduler does with what `FairTurns` looks at: running turns first, then waiting ones, as
many tokens as a step takes; a prompt's part makes a step a pass, and a token of the one who thrashes costs copies.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from wisp_core.engine import fair_turns
from wisp_core.engine.fair_turns import FairTurns

PLACES, STEP_TOKENS = 16, 256
PASS_S, STEP_S, TOKEN_S, COPIES_S = 0.13, 0.007, 0.0003, 0.016
PROMPT, ANSWER, TURNS = 1000, 96, 40


class Turn:
    def __init__(self, tenant: str, number: int, arrived_s: float, prompt: int, answer: int, weight: float) -> None:
        self.tenant, self.request_id, self.arrived_s = tenant, f"{tenant}-{number}", arrived_s
        arguments = {"wisp_session": f"{tenant}/u/s", "wisp_weight": weight}
        self.sampling_params = SimpleNamespace(extra_args=arguments)
        self.num_prompt_tokens, self.max_tokens = prompt, answer
        self.num_computed, self.num_answered = 0, 0
        self.next_decode_eligible_step, self.is_prefill_chunk = 0, False
        self.structured_output_request = None
        self.first_s = 0.0


class Engine:
    """One engine, stepped on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_fair: bool) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(fair_turns, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        pool = SimpleNamespace(num_gpu_blocks=1000)
        self.scheduler: Any = SimpleNamespace(
            running=[],
            waiting=deque(),
            current_step=0,
            max_num_running_reqs=PLACES,
            max_model_len=2048,
            block_size=32,
            kv_cache_manager=SimpleNamespace(block_pool=pool),
        )
        self.turns = FairTurns(self.scheduler)
        self._is_fair = is_fair
        self._noise = random.Random(0)

    def add(self, turn: Turn) -> None:
        self.turns.add(turn)
        self.scheduler.waiting.append(turn)

    def step(self) -> list[Turn]:
        """Run one step; the turns that it ends."""
        if not self.scheduler.running and not self.scheduler.waiting:
            self.now_s += 0.002
            return []
        hidden = self.turns.hide() if self._is_fair else []
        scheduled = self._schedule()
        output = SimpleNamespace(num_scheduled_tokens={turn.request_id: n for turn, n in scheduled.items()})
        self.turns.unhide(hidden, output)
        if not scheduled:
            self.now_s += 0.0002
            return []
        seconds = STEP_S + TOKEN_S * len(scheduled) + PASS_S * any(n > 1 for n in scheduled.values())
        seconds += COPIES_S * sum(turn.tenant == "thrash" and n == 1 for turn, n in scheduled.items())
        seconds *= self._noise.uniform(0.95, 1.1)
        self.now_s += seconds
        self.turns.note_step(seconds)
        return [turn for turn in scheduled if self._ends(turn)]

    def _schedule(self) -> dict[Turn, int]:
        scheduler, left, scheduled = self.scheduler, STEP_TOKENS, {}
        scheduler.current_step += 1
        for turn in scheduler.running:
            if left > 0 and scheduler.current_step >= turn.next_decode_eligible_step:
                scheduled[turn] = min(left, max(1, turn.num_prompt_tokens - turn.num_computed))
                left -= scheduled[turn]
        while left > 0 and scheduler.waiting and len(scheduler.running) < PLACES:
            turn = scheduler.waiting.popleft()
            scheduler.running.append(turn)
            scheduled[turn] = min(left, turn.num_prompt_tokens)
            left -= scheduled[turn]
        for turn, num_tokens in scheduled.items():
            turn.num_computed += num_tokens
            turn.is_prefill_chunk = turn.num_computed < turn.num_prompt_tokens
        return scheduled

    def _ends(self, turn: Turn) -> bool:
        if turn.is_prefill_chunk:
            return False
        turn.num_answered += 1
        turn.first_s = turn.first_s or self.now_s
        if turn.num_answered < turn.max_tokens:
            return False
        self.scheduler.running.remove(turn)
        self.turns.remove(turn)
        return True


def run(monkeypatch: pytest.MonkeyPatch, beside: str, *, is_fair: bool = True) -> tuple[float, float, int]:
    """95th percentiles of the quiet tenant's TTFT and time per token, and how many turns the other ended."""
    engine, number, done, others = Engine(monkeypatch, is_fair=is_fair), 0, [], 0
    next_quiet_s, next_flood_s, is_quiet_running, num_thrash = engine.now_s + 2.0, engine.now_s, False, 0
    while len(done) < TURNS:
        if not is_quiet_running and engine.now_s >= next_quiet_s:
            number, is_quiet_running = number + 1, True
            engine.add(Turn("quiet", number, engine.now_s, PROMPT, ANSWER, 9.0))
        while beside == "flood" and engine.now_s >= next_flood_s:
            number, next_flood_s = number + 1, next_flood_s + 0.5
            engine.add(Turn("flood", number, engine.now_s, 60, 32, 1.0))
        while beside == "thrash" and num_thrash < 2:
            number, num_thrash = number + 1, num_thrash + 1
            engine.add(Turn("thrash", number, engine.now_s, 60, 60, 1.0))
        for turn in engine.step():
            if turn.tenant == "quiet":
                done.append((turn.first_s - turn.arrived_s, (engine.now_s - turn.first_s) / (ANSWER - 1)))
                next_quiet_s, is_quiet_running = engine.now_s + 0.02, False
            else:
                others, num_thrash = others + 1, num_thrash - (beside == "thrash")
    ttfts_s, times_per_token_s = (sorted(values) for values in zip(*done, strict=True))
    place = int(0.95 * TURNS) - 1
    return ttfts_s[place], times_per_token_s[place], others


@pytest.mark.parametrize("beside", ["flood", "thrash"])
def test_a_greedy_tenant_costs_another_one_step_before_and_its_share_after_the_first_token(
    monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    alone = run(monkeypatch, "nobody")
    ttft_s, time_per_token_s, others = run(monkeypatch, beside)
    assert ttft_s <= alone[0] + 1.4 * PASS_S
    assert time_per_token_s <= 1.3 * alone[1]
    assert others > 0, "and it is not starved"


def test_without_shares_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(monkeypatch, "nobody", is_fair=False)
    assert run(monkeypatch, "thrash", is_fair=False)[1] > 3 * alone[1]
