"""Steps overlap, and an empty one passes those that still run: each is timed by its own beginning and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_fixtures  # noqa: F401  first: imports vLLM without its warnings
import pytest

from wisp_core.engine import scheduler as module
from wisp_core.engine.scheduler import WispSchedulerMixin
from wisp_core.engine.step_times import StepTimes


class Vllm:
    """What the mixin stands in front of, as far as steps go."""

    def schedule(self, num_tokens: int) -> Any:
        return SimpleNamespace(total_num_scheduled_tokens=num_tokens, scheduled_new_reqs=[])

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        return


class Watch:
    """Stands for `FairTurns`, `GatedTurns` and `TurnMeter`: remembers what steps took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def note_step(self, *args: Any) -> None:
        self.seconds.append(args[-1])


class Scheduler(WispSchedulerMixin, Vllm):
    def __init__(self) -> None:
        self._wisp_steps = StepTimes()
        self._wisp_turns: Any = Watch()
        self._wisp_gate: Any = Watch()
        self._wisp_meter: Any = Watch()


def test_an_empty_step_does_not_end_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    scheduler = Scheduler()
    first, empty = scheduler.schedule(8), scheduler.schedule(0)
    now_s = 1.0
    scheduler.update_from_output(first, None)
    second = scheduler.schedule(100)
    now_s = 1.001
    scheduler.update_from_output(empty, None)
    now_s = 4.0
    scheduler.update_from_output(second, None)
    assert (scheduler._wisp_steps.steps, scheduler._wisp_steps.seconds) == (2, 4.0)
    assert scheduler._wisp_turns.seconds == scheduler._wisp_gate.seconds == [1.0, 3.0]
