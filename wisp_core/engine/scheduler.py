"""Schedulers that can be asked: vLLM's own, plus the KV balloon and a measure of KV demand.

vLLM resolves a utility call to an attribute of its engine core and calls it between two steps. ``scheduler`` is such
an attribute, so a callable scheduler is reached as ``call_utility("scheduler", command, *args)`` without any patch.
Arguments and results are plain JSON values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from wisp_core.engine.block_balloon import BlockBalloon
from wisp_core.engine.fair_turns import FairTurns
from wisp_core.engine.gated_turns import GatedTurns
from wisp_core.engine.host_kv import blocks_to_copy
from wisp_core.engine.reports import SchedulerReport, TakeReport
from wisp_core.engine.step_times import StepTimes
from wisp_core.engine.turn_meter import TurnMeter
from wisp_core.private_names import check_kv_cache, check_scheduler
from wisp_core.settings import WispSettings

check_scheduler(Scheduler)
check_kv_cache(KVCacheManager)


class WispSchedulerMixin:
    """Commands of the control side, in front of a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        settings = WispSettings.from_additional_config(scheduler.vllm_config.additional_config) or WispSettings()
        self._wisp_balloon = BlockBalloon(
            scheduler.kv_cache_manager,
            watermark=scheduler.scheduler_config.watermark,
            blocks_to_copy=lambda: blocks_to_copy(scheduler),
        )
        self._wisp_meter = TurnMeter(
            scheduler,
            self._wisp_balloon,
            block_tokens=scheduler.block_size,
            max_blocks=len(scheduler.kv_cache_manager.block_pool.blocks),
            window_s=settings.window_s,
            kv_host_bytes=settings.kv_host_bytes,
        )
        self._wisp_steps = StepTimes()
        self._wisp_turns = FairTurns(scheduler)
        self._wisp_gate = GatedTurns(scheduler)
        self._wisp_commands: dict[str, Callable[..., Any]] = {
            "ping": lambda: True,
            "configure": self._wisp_balloon.configure,
            "deflate": self._wisp_deflate,
            "take": self._wisp_take,
            "give": self._wisp_balloon.give,
            "expect": self._wisp_gate.learn,
            "stat": self._wisp_stat,
            "check_integrity": self._wisp_balloon.check_integrity,
        }

    def __call__(self, command: str, *args: Any) -> Any:
        """Run one command between steps; ValueError for an unknown one."""
        if command not in self._wisp_commands:
            raise ValueError(f"unknown command {command!r}, known: {', '.join(self._wisp_commands)}")
        return self._wisp_commands[command](*args)

    def _wisp_deflate(self) -> list[int]:
        """Take every free group, below any floor: only before the engine serves its first request."""
        groups = self._wisp_balloon.available_groups()
        self._wisp_balloon.take(groups)
        return groups

    def _wisp_take(self, counts: list[int]) -> dict[str, Any]:
        """Take as many groups as the first of ``counts``, descending, for which so many are free above the floor."""
        balloon = self._wisp_balloon
        available = balloon.available_groups()
        floor_blocks, usable_blocks = self._wisp_meter.floor_blocks(), balloon.usable_blocks
        most = min(len(available), max(0, usable_blocks - floor_blocks) // balloon.group_blocks)
        groups = available[: next((count for count in counts if count <= most), 0)]
        balloon.take(groups)
        return TakeReport(
            groups=groups, available_groups=len(available), floor_blocks=floor_blocks, usable_blocks=usable_blocks
        ).model_dump()

    def _wisp_stat(self) -> dict[str, Any]:
        now_s = time.monotonic()
        return SchedulerReport(
            usable_blocks=self._wisp_balloon.usable_blocks,
            taken_groups=tuple(self._wisp_balloon.taken),
            steps=self._wisp_steps.steps,
            step_seconds=self._wisp_steps.seconds,
            kv=self._wisp_meter.demand(now_s),
        ).model_dump()

    # What follows overrides vLLM's scheduler, to see turns come, start and go.

    def add_request(self, request: Any) -> None:
        """Queue a request."""
        self._wisp_turns.add(request)
        super().add_request(request)  # type: ignore[misc]
        self._wisp_meter.note_arrived(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Decide the next step."""
        started_s = time.monotonic()
        hidden = self._wisp_turns.hide()
        held = self._wisp_gate.hold()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._wisp_gate.release(held)
        self._wisp_turns.unhide(hidden, output)
        if output.total_num_scheduled_tokens:
            self._wisp_steps.note_start(started_s)
        self._wisp_meter.note_scheduled(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Take in a step's tokens: the end of the step."""
        self._wisp_meter.note_output(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)  # type: ignore[misc]
        # An empty step passes those that still run, and was not noted when it was scheduled.
        if scheduler_output.total_num_scheduled_tokens:
            seconds = self._wisp_steps.note_end(time.monotonic())
            self._wisp_turns.note_step(seconds)
            self._wisp_gate.note_step(scheduler_output, seconds)
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        computed_tokens = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._wisp_meter.note_preemption(request.request_id, computed_tokens)

    def _free_blocks(self, request: Any) -> None:
        self._wisp_meter.note_finished(request)
        self._wisp_turns.remove(request)
        super()._free_blocks(request)  # type: ignore[misc]
        self._wisp_meter.note_change()


class WispScheduler(WispSchedulerMixin, Scheduler):  # type: ignore[misc]
    """For the CPU platform, where vLLM schedules synchronously."""


class WispAsyncScheduler(WispSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """For a GPU: keeps vLLM's asynchronous scheduling."""
