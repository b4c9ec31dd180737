"""How the resizer reaches a live engine, whatever runs it."""

from __future__ import annotations

from typing import Protocol

from wisp_core.engine.reports import MemoryReport, SchedulerReport, TakeReport
from wisp_core.errors import WispError


class CommandFailedError(WispError):
    """A command raised inside the engine, which lives on; the command has changed nothing."""


class DrainTimeoutError(WispError):
    """Running requests did not finish in time; the engine runs on as before."""


class EngineControl(Protocol):
    """Commands to one engine, each carried out between two steps.

    Every method raises EngineUnavailableError when the engine is dead or does not answer; what else it raises has
    changed nothing.
    """

    async def pool_reports(self) -> tuple[SchedulerReport, MemoryReport]:
        """Blocks, groups out of the pool and demand; bytes and backed groups: of one moment."""
        ...

    async def configure(self, group_blocks: int) -> None:
        """Tell the scheduler the group size, once after the start."""
        ...

    async def deflate(self) -> None:
        """Take every free group but the null block's; only before the first request."""
        ...

    async def take_groups(self, counts: list[int]) -> TakeReport:
        """Take as many free groups out of vLLM's pool as the first of ``counts`` that is possible; else none."""
        ...

    async def give_groups(self, groups: list[int]) -> None:
        """Put taken groups back into vLLM's pool."""
        ...

    async def unmap_groups(self, groups: list[int]) -> None:
        """Return the pages of taken groups."""
        ...

    async def map_groups(self, groups: list[int]) -> None:
        """Back taken groups with zero pages."""
        ...

    async def set_cap(self, cap: int) -> None:
        """Give every layer ``cap`` expert slots."""
        ...

    async def hold(self) -> None:
        """Let no step begin until `resume`; returns once none runs. Requests wait meanwhile, running ones too."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Hold new requests back and wait for the running ones. Raises DrainTimeoutError; always `resume` after."""
        ...

    async def resume(self) -> None:
        """Let requests run again."""
        ...
