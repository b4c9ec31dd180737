"""An `EngineControl` in memory: a real arena, a list of groups, and a switch that makes one command fail."""

from __future__ import annotations

import asyncio

from wisp_core.contracts import KvDemand, MemoryLayout
from wisp_core.engine.control import CommandFailedError, DrainTimeoutError
from wisp_core.engine.reports import LayoutReport, MemoryReport, SchedulerReport, TakeReport
from wisp_core.errors import EngineUnavailableError, IntegrityError, WispError
from wisp_core.memory.arena import Arena

PAGE = 4096
LAYOUT = MemoryLayout(
    page_bytes=PAGE,
    num_layers=2,
    num_experts=8,
    top_k=2,
    min_cap=2,
    experts_bytes_by_cap=tuple(cap * 4 * PAGE for cap in range(9)),
    expert_bytes=2 * PAGE,
    block_tokens=16,
    block_bytes=PAGE,
    kv_group_blocks=2,
    max_kv_blocks=31,
    max_model_len=64,
    max_num_seqs=4,
)
BUDGET_BYTES = 40 * PAGE


class FakeEngine:
    """Sixteen groups of two blocks; a group costs two pages, a slot four."""

    def __init__(self) -> None:
        self.arena = Arena(budget_bytes=BUDGET_BYTES, page_bytes=PAGE, kv_group_bytes=2 * PAGE)
        self.cap = LAYOUT.min_cap
        self.arena.set_expert_bytes(LAYOUT.experts_bytes_by_cap[self.cap])
        self.arena.add_kv_groups([0])
        self.taken: set[int] = set()
        self.busy: set[int] = set()
        self.floor_blocks = 4
        self.is_drained = False
        self.can_drain = True
        self.is_held = False
        self.num_holds = 0
        self.step_s = self.move_s = 0.0
        self.fail_at: list[str] = []
        self.error: type[WispError] = CommandFailedError
        self.log: list[str] = []

    def facts(self) -> LayoutReport:
        return LayoutReport(
            layout=LAYOUT,
            budget_bytes=BUDGET_BYTES,
            other_bytes=0,
            measured_other_bytes=0,
            worker_pid=1,
            emulated_link_bytes_per_s=None,
        )

    @property
    def usable_blocks(self) -> int:
        return (16 - len(self.taken)) * 2 - 1

    def state(self) -> tuple[int, int, frozenset[int], int]:
        """All that a resize may change."""
        return self.cap, len(self.taken), self.arena.kv_groups, self.arena.free_bytes

    def _run(self, command: str) -> None:
        self.log.append(command)
        if self.fail_at and self.fail_at[0] == command:
            self.fail_at.pop(0)
            raise self.error(f"{command}: broken on purpose")

    async def scheduler_report(self) -> SchedulerReport:
        return SchedulerReport(
            usable_blocks=self.usable_blocks,
            taken_groups=tuple(sorted(self.taken)),
            kv=KvDemand(floor_blocks=self.floor_blocks),
        )

    async def pool_reports(self) -> tuple[SchedulerReport, MemoryReport]:
        return await self.scheduler_report(), await self.memory_report()

    async def memory_report(self) -> MemoryReport:
        return MemoryReport(
            cap=self.cap,
            kv_groups=tuple(sorted(self.arena.kv_groups)),
            resident_bytes=self.arena.expert_bytes + self.arena.kv_bytes,
        )

    async def configure(self, group_blocks: int) -> None:
        assert group_blocks == LAYOUT.kv_group_blocks

    async def deflate(self) -> None:
        self.taken = set(range(1, 16))

    async def take_groups(self, counts: list[int]) -> TakeReport:
        self._run("take")
        free = [group for group in range(15, 0, -1) if group not in self.taken | self.busy]
        usable = self.usable_blocks
        possible = [n for n in counts if n <= len(free) and usable - 2 * n >= self.floor_blocks]
        groups = free[: possible[0] if possible else 0]
        self.taken.update(groups)
        return TakeReport(
            groups=tuple(groups),
            available_groups=len(free),
            floor_blocks=self.floor_blocks,
            usable_blocks=usable,
        )

    async def give_groups(self, groups: list[int]) -> None:
        self._run("give")
        assert self.taken.issuperset(groups)
        assert self.arena.kv_groups.issuperset(groups), "blocks without pages would be used"
        self.taken.difference_update(groups)

    async def unmap_groups(self, groups: list[int]) -> None:
        self._run("unmap")
        await asyncio.sleep(self.move_s)
        assert self.taken.issuperset(groups), "pages of blocks in use would go"
        self.arena.remove_kv_groups(groups)

    async def map_groups(self, groups: list[int]) -> None:
        self._run("map")
        await asyncio.sleep(self.move_s)
        self.arena.add_kv_groups(groups)

    async def set_cap(self, cap: int) -> None:
        self._run("set_cap")
        self.arena.set_expert_bytes(LAYOUT.experts_bytes_by_cap[cap])
        self.cap = cap

    async def hold(self) -> None:
        assert not self.is_held
        self.is_held = True
        self.num_holds += 1
        await asyncio.sleep(self.step_s)
        if self.fail_at == ["hold"]:
            raise self.error("hold: broken on purpose")

    async def drain(self, timeout_s: float) -> None:
        self.log.append("drain")
        if not self.can_drain:
            raise DrainTimeoutError(f"requests still run after {timeout_s:g} s")
        self.is_drained, self.busy = True, set()

    async def resume(self) -> None:
        if not self.is_held:
            self.log.append("resume")
        self.is_drained = self.is_held = False

    async def check_integrity(self) -> None:
        self.arena.check_integrity()
        if set(range(16)) - self.taken - self.arena.kv_groups:
            raise IntegrityError("blocks in the pool without pages")


__all__ = ["BUDGET_BYTES", "LAYOUT", "PAGE", "EngineUnavailableError", "FakeEngine"]
