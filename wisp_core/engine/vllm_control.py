"""`EngineControl` over vLLM: by messages to an AsyncLLM's processes, or by calls into an LLM in this process."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from vllm import LLM
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from wisp_core.contracts import Signature
from wisp_core.engine.control import CommandFailedError, DrainTimeoutError
from wisp_core.engine.reports import LayoutReport, MemoryReport, PagerReport, SchedulerReport, TakeReport
from wisp_core.errors import EngineUnavailableError, IntegrityError

DEATH_CHECK_PERIOD_S = 0.1

_COMPUTE_S = 30.0
"""More than any step computes."""
_SLOW_LINK_BYTES_PER_S = 2e9
"""Less than any link to a GPU that is worth paging over."""


def longest_step_s(facts: LayoutReport) -> float:
    """More than any step takes, in seconds: a prefill copies each expert once at most."""
    if not facts.layout.is_paged:
        return _COMPUTE_S
    link_bytes_per_s = facts.emulated_link_bytes_per_s or _SLOW_LINK_BYTES_PER_S
    return _COMPUTE_S + facts.layout.experts_bytes_by_cap[-1] / link_bytes_per_s


class VllmControl(ABC):
    """Commands and questions in terms of one call to the scheduler and one to the worker."""

    @abstractmethod
    async def _scheduler(self, command: str, *args: Any) -> Any:
        """Run a command of `WispSchedulerMixin`."""

    @abstractmethod
    async def _worker(self, method: str, *args: Any) -> Any:
        """Run a ``wisp_`` method of the worker."""

    @abstractmethod
    async def hold(self) -> None:
        """See `EngineControl`."""

    @abstractmethod
    async def drain(self, timeout_s: float) -> None:
        """See `EngineControl`."""

    @abstractmethod
    async def resume(self) -> None:
        """See `EngineControl`."""

    async def layout(self) -> LayoutReport:
        """What does not change."""
        return LayoutReport.model_validate(await self._worker("wisp_layout"))

    async def scheduler_report(self) -> SchedulerReport:
        """Blocks, groups out of the pool, demand."""
        return SchedulerReport.model_validate(await self._scheduler("stat"))

    async def memory_report(self) -> MemoryReport:
        """Bytes and backed groups."""
        return MemoryReport.model_validate(await self._worker("wisp_memory"))

    async def pool_reports(self) -> tuple[SchedulerReport, MemoryReport]:
        """See `EngineControl`."""
        return await self.scheduler_report(), await self.memory_report()

    async def pager_report(self) -> PagerReport:
        """Counters and curves."""
        return PagerReport.model_validate(await self._worker("wisp_pager"))

    async def signatures(self) -> list[Signature]:
        """Tallies of the keys touched since the last call."""
        return [Signature.model_validate(report) for report in await self._worker("wisp_signatures")]

    async def expect(self, cap: int, masks: dict[str, list[str]]) -> None:
        """Tell the scheduler the slots per layer and working sets by session: hexadecimal masks of some layers."""
        await self._scheduler("expect", cap, masks)

    async def configure(self, group_blocks: int) -> None:
        """See `EngineControl`."""
        await self._scheduler("configure", group_blocks)

    async def deflate(self) -> None:
        """See `EngineControl`."""
        await self._scheduler("deflate")

    async def take_groups(self, counts: list[int]) -> TakeReport:
        """See `EngineControl`."""
        return TakeReport.model_validate(await self._scheduler("take", counts))

    async def give_groups(self, groups: list[int]) -> None:
        """See `EngineControl`."""
        await self._scheduler("give", groups)

    async def unmap_groups(self, groups: list[int]) -> None:
        """See `EngineControl`."""
        await self._worker("wisp_unmap_groups", groups)

    async def map_groups(self, groups: list[int]) -> None:
        """See `EngineControl`."""
        await self._worker("wisp_map_groups", groups)

    async def set_cap(self, cap: int) -> None:
        """See `EngineControl`."""
        await self._worker("wisp_set_cap", cap)

    async def ping(self) -> None:
        """Return when both the engine loop and the worker answer."""
        await self._scheduler("ping")
        await self._worker("wisp_pid")

    async def check_integrity(self) -> None:
        """Raise IntegrityError when a conservation check of the scheduler or the worker fails."""
        try:
            await self._scheduler("check_integrity")
            await self._worker("wisp_check_integrity")
        except CommandFailedError as error:
            raise IntegrityError(str(error)) from error


class AsyncControl(VllmControl):
    """Over the processes of an AsyncLLM."""

    def __init__(self, llm: AsyncLLM, timeout_s: float = 2 * _COMPUTE_S) -> None:
        """A command waits for the step that runs; after ``timeout_s`` it waits for a hung engine."""
        self._llm = llm
        self._timeout_s = timeout_s

    async def ping(self) -> None:
        """See `VllmControl`. Asked at once, both wait for the same step."""
        await asyncio.gather(self._scheduler("ping"), self._worker("wisp_pid"))

    async def pool_reports(self) -> tuple[SchedulerReport, MemoryReport]:
        """See `EngineControl`. Asked at once, both are answered between the same two steps."""
        return await asyncio.gather(self.scheduler_report(), self.memory_report())

    async def hold(self) -> None:
        """See `EngineControl`. As vLLM's ``pause_generation`` does, without its pause for outputs to arrive."""
        await self._call("hold", self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def drain(self, timeout_s: float) -> None:
        """See `EngineControl`. Requests that wait in the queue go on waiting and are not what is waited for."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._answer("drain", self._llm.pause_generation(mode="wait", clear_cache=False))
        except TimeoutError as error:
            raise DrainTimeoutError(f"requests still run after {timeout_s:g} s") from error

    async def resume(self) -> None:
        """See `EngineControl`."""
        await self._call("resume", self._llm.resume_generation())

    async def _scheduler(self, command: str, *args: Any) -> Any:
        return await self._call(command, self._llm.engine_core.call_utility_async("scheduler", command, *args))

    async def _worker(self, method: str, *args: Any) -> Any:
        return (await self._call(method, self._llm.collective_rpc(method, args=args)))[0]

    async def _call(self, name: str, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._answer(name, call)
        except TimeoutError as error:
            raise EngineUnavailableError(f"{name}: no answer within {self._timeout_s:g} s") from error

    async def _answer(self, name: str, call: Coroutine[Any, Any, Any]) -> Any:
        """The answer, however long it takes: vLLM leaves whoever waits for an engine that dies meanwhile waiting."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answer}, timeout=DEATH_CHECK_PERIOD_S))[0]:
                if self._llm.errored:
                    raise EngineDeadError
            return answer.result()
        except EngineDeadError as error:
            raise EngineUnavailableError(f"{name}: the engine is dead") from error
        except Exception as error:
            raise CommandFailedError(f"{name}: {error}") from error
        finally:
            answer.cancel()


class LocalControl(VllmControl):
    """Over an LLM whose engine runs in this process: nothing here ever waits."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    async def hold(self) -> None:
        """See `EngineControl`. No step runs."""

    async def drain(self, timeout_s: float) -> None:
        """See `EngineControl`. Nobody else steps this engine, so waiting would not help."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise DrainTimeoutError("requests are unfinished, and this engine only runs inside generate()")

    async def resume(self) -> None:
        """See `EngineControl`."""

    async def _scheduler(self, command: str, *args: Any) -> Any:
        return self._call(command, self._llm.llm_engine.engine_core.engine_core.scheduler, command, *args)

    async def _worker(self, method: str, *args: Any) -> Any:
        return self._call(method, self._llm.llm_engine.collective_rpc, method, None, args)[0]

    @staticmethod
    def _call(name: str, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise CommandFailedError(f"{name}: {error}") from error
