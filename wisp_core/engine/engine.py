"""`WispEngine`: one paged vLLM engine as a service sees it. It serves, reports, resizes, dies and comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from wisp_core.contracts import ReplicaSnapshot, ResizeOutcome, Signature, SplitPlan
from wisp_core.engine.arguments import paged_engine_args
from wisp_core.engine.control import CommandFailedError
from wisp_core.engine.gated_turns import expected_masks
from wisp_core.engine.openai_app import openai_app, serve_args
from wisp_core.engine.reports import LayoutReport
from wisp_core.engine.resizer import Resizer
from wisp_core.engine.session_tally import EVERYONE
from wisp_core.engine.telemetry import RateMeter, build_snapshot
from wisp_core.engine.vllm_control import AsyncControl, longest_step_s
from wisp_core.errors import ConfigurationError, EngineUnavailableError
from wisp_core.memory.initial_split import initial_split
from wisp_core.settings import WispSettings

logger = logging.getLogger(__name__)

AsgiApp = Callable[[MutableMapping[str, Any], Callable[..., Any], Callable[..., Any]], Awaitable[None]]

_EXIT_GRACE_S = 10.0
"""Time that old engine processes get to exit before they are killed: two engines never hold memory at once."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What to start, and to start again."""

    model: str
    """Hugging Face MoE directory or name."""
    served_name: str
    """The model's name in the API."""
    engine_args: dict[str, Any]
    """vLLM's serve arguments by their Python names, tool parser and the like included."""
    settings: WispSettings
    """Budget, caps and link of this engine; ``cap`` None means half of the budget."""
    replica_id: str
    """Who this is in snapshots and outcomes."""


@dataclass(frozen=True, kw_only=True)
class _Incarnation:
    """Everything that ends with the engine's processes."""

    incarnation: str
    llm: AsyncLLM
    control: AsyncControl
    facts: LayoutReport
    resizer: Resizer
    rates: RateMeter
    app: AsgiApp


class WispEngine:
    """A live engine. Methods raise EngineUnavailableError while it is dead, hung or restarting."""

    def __init__(self, request: EngineRequest) -> None:
        """Use `start`."""
        self._request = request
        self._live: _Incarnation | None = None
        self._processes: list[psutil.Process] = []

    @classmethod
    async def start(cls, request: EngineRequest) -> WispEngine:
        """Start an engine and bring it to its first split; 20 to 60 s, most of it imports in its processes.

        Raises ConfigurationError, which names what to change: arguments that cannot work, or an engine that did not
        start.
        """
        engine = cls(request)
        await engine._launch()
        return engine

    @property
    def app(self) -> AsgiApp:
        """vLLM's OpenAI application, to be called as raw ASGI; stays valid over a restart."""
        return self._serve

    @property
    def is_dead(self) -> bool:
        """Whether the engine cannot serve: its processes died, or it is being restarted."""
        return self._live is None or bool(self._live.llm.errored)

    def engine_pids(self) -> list[int]:
        """Processes of the engine, this one excluded: vLLM's engine core, with the worker in it or beside it."""
        return [process.pid for process in self._processes]

    async def snapshot(self) -> ReplicaSnapshot:
        """State, demand and rates now."""
        live = self._alive()
        # Asked at once, they are answered between the same two steps, which matters where a step takes a second.
        (scheduler, memory), pager = await asyncio.gather(live.control.pool_reports(), live.control.pager_report())
        snapshot = build_snapshot(
            replica_id=self._request.replica_id,
            incarnation=live.incarnation,
            model=self._request.served_name,
            facts=live.facts,
            scheduler=scheduler,
            memory=memory,
            pager=pager,
            rates=live.rates.observe_reports(time.monotonic(), pager, scheduler),
            plan_revision=live.resizer.plan_revision,
            is_resizing=live.resizer.is_resizing,
            is_draining=live.resizer.is_draining,
        )
        # Between the steps of a resize the pools show neither split: report the one that holds until it is done.
        return snapshot.model_copy(update={"split": live.resizer.split}) if live.resizer.is_resizing else snapshot

    async def signatures(self) -> list[Signature]:
        """Signatures of the keys that decoded since the last call; the replica's own carries its id as key."""
        return [
            signature if signature.key != EVERYONE else signature.model_copy(update={"key": self._request.replica_id})
            for signature in await self._alive().control.signatures()
        ]

    async def expect(self, signatures: Iterable[Signature]) -> None:
        """Tell the scheduler of these sessions, where it looks at their experts (``co_schedule``)."""
        if self._request.settings.co_schedule:
            live = self._alive()
            await live.control.expect(live.resizer.split.cap, expected_masks(signatures))

    async def resize(self, plan: SplitPlan) -> ResizeOutcome:
        """Put ``plan`` into effect, or say why not."""
        return await self._alive().resizer.resize(plan)

    async def check_integrity(self) -> None:
        """Raise IntegrityError when free + used = total fails anywhere."""
        await self._alive().control.check_integrity()

    async def heartbeat(self, timeout_s: float | None = None) -> None:
        """Return when engine loop and worker answer. Raises EngineUnavailableError when dead, hung or of no more use.

        vLLM itself notices a process that died, not one that hangs: one that does not answer within ``timeout_s``,
        which is more than any of its steps takes if it is not given.
        """
        live = self._alive()
        if timeout_s is None:
            timeout_s = longest_step_s(live.facts)
        try:
            async with asyncio.timeout(timeout_s):
                await live.control.ping()
        except TimeoutError as error:
            raise EngineUnavailableError(f"the engine did not answer within {timeout_s:g} s") from error
        except CommandFailedError as error:
            raise EngineUnavailableError(f"the engine can run no step: {error}") from error

    async def restart(self) -> None:
        """Replace the engine by a new incarnation at its first split; running requests fail."""
        await self.shutdown()
        await self._launch()

    async def shutdown(self) -> None:
        """Stop the engine and wait until its processes are gone."""
        live, self._live = self._live, None
        processes, self._processes = self._processes, []
        if live is not None:
            await asyncio.to_thread(live.llm.shutdown)
        await asyncio.to_thread(_wait_gone, processes)

    async def _launch(self) -> None:
        request = self._request
        engine_args = paged_engine_args(request.model, request.engine_args, request.settings)
        args = serve_args(request.model, request.served_name, engine_args)
        llm = await _built(args)
        try:
            self._live = await self._prepare(llm, args)
        except BaseException:
            await asyncio.to_thread(llm.shutdown)
            raise
        logger.info(
            "WiSP engine %s: cap %d, %d KV blocks",
            self._live.incarnation,
            self._live.resizer.split.cap,
            self._live.resizer.split.kv_blocks,
        )

    async def _prepare(self, llm: AsyncLLM, args: Any) -> _Incarnation:
        request = self._request
        facts = await AsyncControl(llm).layout()
        control = AsyncControl(llm, timeout_s=2 * longest_step_s(facts))
        self._processes = _engine_processes(facts.worker_pid)
        incarnation = uuid.uuid4().hex[:12]
        resizer = Resizer(
            control,
            facts,
            replica_id=request.replica_id,
            incarnation=incarnation,
            drain_timeout_s=request.settings.drain_timeout_s,
        )
        await resizer.start(initial_split(facts.layout, budget_bytes=facts.budget_bytes, cap=request.settings.cap))
        return _Incarnation(
            incarnation=incarnation,
            llm=llm,
            control=control,
            facts=facts,
            resizer=resizer,
            rates=RateMeter(request.settings.window_s),
            app=await openai_app(llm, args),
        )

    async def _serve(
        self, scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Callable[..., Any]
    ) -> None:
        await self._alive().app(scope, receive, send)

    def _alive(self) -> _Incarnation:
        if self._live is None:
            raise EngineUnavailableError("the engine is not running")
        if self._live.llm.errored:
            raise EngineUnavailableError("the engine is dead")
        return self._live


async def _built(args: Any) -> AsyncLLM:
    """Building cannot be broken off: whoever is cancelled meanwhile waits for the engine, and ends it."""
    building = asyncio.ensure_future(asyncio.to_thread(_build, args))
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        with suppress(ConfigurationError):
            await asyncio.to_thread((await building).shutdown)
        raise


def _build(args: Any) -> AsyncLLM:
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    except (RuntimeError, TypeError, ValueError) as error:  # a dead engine core, or arguments that vLLM refuses
        raise ConfigurationError(f"the engine did not start, its log names the setting to change: {error}") from error


def _engine_processes(worker_pid: int) -> list[psutil.Process]:
    """vLLM's engine core and its child, the worker; on one GPU both are one process, a child of this one."""
    try:
        worker = psutil.Process(worker_pid)
        core = worker.parent()
    except psutil.NoSuchProcess as error:
        raise EngineUnavailableError("the engine died while it started") from error
    return [worker] if core is None or core.pid == os.getpid() else [core, worker]


def _wait_gone(processes: list[psutil.Process]) -> None:
    """Wait for processes to exit, and kill what does not: a hung one never would."""
    _, alive = psutil.wait_procs(processes, timeout=_EXIT_GRACE_S)
    for process in alive:
        logger.warning("killing engine process %d: it did not exit within %g s", process.pid, _EXIT_GRACE_S)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_EXIT_GRACE_S)
