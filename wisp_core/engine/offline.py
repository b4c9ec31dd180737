"""`OfflineEngine`: an LLM in this process with the same memory and resizes, for tests and for reference answers."""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from vllm import LLM, RequestOutput, SamplingParams

from wisp_core.contracts import Barrier, ReplicaSnapshot, ResizeOutcome, Signature, Split, SplitPlan
from wisp_core.engine.arguments import paged_engine_args, resident_engine_args
from wisp_core.engine.gated_turns import expected_masks
from wisp_core.engine.reports import LayoutReport
from wisp_core.engine.resizer import Resizer
from wisp_core.engine.telemetry import RateMeter, build_snapshot
from wisp_core.engine.vllm_control import LocalControl
from wisp_core.errors import ConfigurationError
from wisp_core.memory.initial_split import initial_split
from wisp_core.settings import WispSettings

T = TypeVar("T")

REPLICA_ID = "offline"


class OfflineEngine:
    """Give ``settings`` for a paged engine, None for one that holds every expert.

    Needs ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, set before vLLM is imported. ``llm`` is the plain vLLM object, for
    tests that step it themselves.
    """

    def __init__(self, model: str, engine_args: dict[str, Any], settings: WispSettings | None = None) -> None:
        """Start the engine. Raises ConfigurationError when the budget cannot hold κ_min, with the numbers."""
        arguments = (
            resident_engine_args(engine_args) if settings is None else paged_engine_args(model, engine_args, settings)
        )
        self.incarnation = uuid.uuid4().hex[:12]
        self.llm = LLM(model=model, **arguments)
        if not hasattr(self.llm.llm_engine.engine_core, "engine_core"):
            self.shutdown()
            raise ConfigurationError("OfflineEngine runs in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0")
        self._resizer: Resizer | None = None
        if settings is not None:
            self._control = LocalControl(self.llm)
            self._rates = RateMeter(settings.window_s)
            self._facts = _run(self._control.layout())
            self._resizer = Resizer(
                self._control,
                self._facts,
                replica_id=REPLICA_ID,
                incarnation=self.incarnation,
                drain_timeout_s=settings.drain_timeout_s,
            )
            split = initial_split(self._facts.layout, budget_bytes=self._facts.budget_bytes, cap=settings.cap)
            _run(self._resizer.start(split))

    def generate(
        self, prompts: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Answer all prompts, added before the first step."""
        outputs: list[RequestOutput] = self.llm.generate(prompts, sampling_params, use_tqdm=False)
        return outputs

    def plan(self, split: Split, *, barrier: Barrier = Barrier.BALLOON) -> SplitPlan:
        """A plan for this engine with the next revision."""
        return SplitPlan(
            replica_id=REPLICA_ID,
            incarnation=self.incarnation,
            revision=self._paged().plan_revision + 1,
            split=split,
            barrier=barrier,
            policy="offline",
            reason="asked for",
        )

    def resize(self, plan: SplitPlan) -> ResizeOutcome:
        """Put ``plan`` into effect, or say why not."""
        self.settle()
        return _run(self._paged().resize(plan))

    def settle(self) -> None:
        """Let copies of KV to host memory end: they go on in steps, and after `generate` nothing steps this engine."""
        while self.scheduler.has_requests() and not self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    def snapshot(self) -> ReplicaSnapshot:
        """State, demand and rates now."""
        resizer = self._paged()
        pager, scheduler = _run(self._control.pager_report()), _run(self._control.scheduler_report())
        return build_snapshot(
            replica_id=REPLICA_ID,
            incarnation=self.incarnation,
            model=self.llm.llm_engine.model_config.model,
            facts=self._facts,
            scheduler=scheduler,
            memory=_run(self._control.memory_report()),
            pager=pager,
            rates=self._rates.observe_reports(time.monotonic(), pager, scheduler),
            plan_revision=resizer.plan_revision,
            is_resizing=False,
        )

    @property
    def facts(self) -> LayoutReport:
        """What does not change while it lives."""
        self._paged()
        return self._facts

    @property
    def scheduler(self) -> Any:
        """vLLM's, for tests that look behind the scenes."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def signatures(self) -> list[Signature]:
        """Signatures of the keys that decoded since the last call; "" is the whole engine."""
        self._paged()
        return _run(self._control.signatures())

    def expect(self, signatures: Sequence[Signature]) -> None:
        """Have turns of these sessions start together only where their experts fit the slots."""
        _run(self._control.expect(self._paged().split.cap, expected_masks(signatures)))

    def check_integrity(self) -> None:
        """Raise IntegrityError when free + used = total fails anywhere."""
        self._paged()
        _run(self._control.check_integrity())

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()

    def _paged(self) -> Resizer:
        if self._resizer is None:
            raise ConfigurationError("this engine holds every expert: it was started without WiSP settings")
        return self._resizer


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, as all of `LocalControl` and what is built on it."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("an in-process command tried to wait")


__all__ = ["REPLICA_ID", "OfflineEngine", "SamplingParams"]
