"""Tenants in a real engine's scheduler: who starts, who is held out of steps, and that no answer depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, answers, prompt

from wisp_core.engine.offline import OfflineEngine, SamplingParams
from wisp_core.settings import WispSettings

LINK_BYTES_PER_S = 4e8
"""Slow enough that a step whose experts are missing takes several times as long as one whose are there."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[OfflineEngine]:
    settings = WispSettings(
        cap=8,
        vram_budget_bytes=BUDGET_BYTES,
        activation_bytes=ACTIVATION_BYTES,
        emulated_link_bytes_per_s=LINK_BYTES_PER_S,
    )
    engine = OfflineEngine(str(tiny_model), {**ENGINE_ARGS, "max_num_batched_tokens": 64}, settings)
    yield engine
    engine.shutdown()


def terms(tenant: str, max_tokens: int, *, temperature: float = 0.0, **shares: float) -> SamplingParams:
    arguments = {"wisp_session": f"{tenant}/u/s", **{f"wisp_{name}": share for name, share in shares.items()}}
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=7, ignore_eos=True, logprobs=1, extra_args=arguments
    )


class Stepped:
    """Turns that are added one by one while the engine is stepped by hand."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._llm = engine.llm.llm_engine
        self.scheduler = self._llm.engine_core.engine_core.scheduler
        self.finished: list[str] = []
        self.held_steps = 0

    def add(self, name: str, number: int, num_tokens: int, sampling: SamplingParams) -> None:
        self._llm.add_request(name, prompt(number, num_tokens), sampling)

    def step(self) -> None:
        self.finished += [output.request_id for output in self._llm.step() if output.finished]
        self.held_steps += bool(self.scheduler._wisp_turns._held)

    def run(self) -> None:
        while self._llm.has_unfinished_requests():
            self.step()

    def running(self) -> Counter[str]:
        return Counter(str(request.request_id).split("-")[0] for request in self.scheduler.running)


def test_a_newcomer_starts_before_the_waiting_turns_of_a_flood(engine: OfflineEngine) -> None:
    steps = Stepped(engine)
    for number in range(16):
        steps.add(f"flood-{number}", number, 40, terms("flood", 5))
    for _ in range(5):
        steps.step()
    assert len(steps.scheduler.waiting) >= 6
    steps.add("guest-0", 50, 40, terms("guest", 5))
    steps.run()
    after_guest = steps.finished[steps.finished.index("guest-0") + 1 :]
    assert len(after_guest) >= 4
    assert len(steps.finished) == 17
    flood = [name for name in steps.finished if name.startswith("flood")]
    assert flood == sorted(flood, key=lambda name: int(name.split("-")[1])), "a tenant's own turns keep their order"


def test_a_tenant_s_running_turns_stay_within_its_share(engine: OfflineEngine) -> None:
    steps = Stepped(engine)
    for number in range(6):
        steps.add(f"half-{number}", number, 30, terms("half", 6, kv_share=0.5))
    most = 0
    while engine.llm.llm_engine.has_unfinished_requests():
        steps.step()
        most = max(most, steps.running()["half"])
    assert most == ENGINE_ARGS["max_num_seqs"] // 2
    # A share that holds not even one turn lets turns through one by one.
    for number in range(3):
        steps.add(f"sliver-{number}", number, 30, terms("sliver", 6, kv_share=0.001))
    most = 0
    while engine.llm.llm_engine.has_unfinished_requests():
        steps.step()
        most = max(most, steps.running()["sliver"])
    assert most == 1
    assert len(steps.finished) == 9


def test_turns_that_are_held_out_of_steps_get_the_same_answers(engine: OfflineEngine) -> None:
    numbers = range(4)
    mixed: list[Any] = [
        terms("thrash", 25, temperature=2.0, weight=1.0) if number % 2 else terms("steady", 50, weight=4.0)
        for number in numbers
    ]
    prompts = [prompt(100 + number, 40) for number in numbers]
    turns = engine.llm.llm_engine.engine_core.engine_core.scheduler._wisp_turns
    held: Counter[frozenset[str]] = Counter()
    hide = turns.hide

    def counted() -> list[Any]:
        hidden: list[Any] = hide()
        held[turns._held] += 1
        return hidden

    turns.hide = counted
    try:
        together = answers(engine.generate(prompts, mixed))
    finally:
        del turns.hide
    assert held[frozenset({"thrash"})] > 0
    alone = [answers(engine.generate([one], [sampling]))[0] for one, sampling in zip(prompts, mixed, strict=True)]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    engine.check_integrity()


def test_nothing_is_remembered_of_turns_that_ended(engine: OfflineEngine) -> None:
    turns = engine.llm.llm_engine.engine_core.engine_core.scheduler._wisp_turns
    engine.generate([prompt(1, 30)], [terms("last", 4)])
    assert not turns._terms
    assert not turns._num_turns
    assert not turns._steps
