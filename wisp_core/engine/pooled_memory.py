"""The worker's side of a resize: the arena, the KV region and the expert pool, kept in step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wisp_core.engine.reports import MemoryReport
from wisp_core.errors import ConfigurationError, IntegrityError
from wisp_core.memory.arena import Arena
from wisp_core.memory.balloon import NULL_GROUP, KvGeometry
from wisp_core.memory.region import Region
from wisp_core.pager.interface import ExpertPager
from wisp_core.pager.resident_experts import ResidentExperts


class PooledMemory:
    """Moves pages between experts and KV. The arena is equal to what is backed, or nothing works any more.

    Memory that is refused changes nothing. Any other failure (a driver's) may have moved some pages and not others;
    then every method raises IntegrityError, `check_usable` among them, without which no step may run.
    """

    def __init__(
        self, *, budget_bytes: int, experts: ExpertPager | ResidentExperts, kv_region: Region, geometry: KvGeometry
    ) -> None:
        """Account the experts as they are and back the null group; all other KV groups start without pages."""
        self._experts = experts
        self._region = kv_region
        self.geometry = geometry
        self.arena = Arena(
            budget_bytes=budget_bytes, page_bytes=geometry.page_bytes, kv_group_bytes=geometry.group_bytes
        )
        self._experts_bytes = experts.experts_bytes_by_cap()
        self._failure: Exception | None = None
        self.arena.set_expert_bytes(self._experts_bytes[experts.cap])
        self.map_groups([NULL_GROUP])

    def check_usable(self) -> None:
        """Raise IntegrityError once it is not known any more which pages are backed."""
        if self._failure is not None:
            raise IntegrityError(f"moving pages failed, the engine has to be restarted: {self._failure}")

    def set_cap(self, cap: int) -> None:
        """Give every layer ``cap`` slots. Raises CapacityError or MemoryError with nothing changed."""
        self.check_usable()
        before_bytes = self._experts_bytes[self._experts.cap]
        after_bytes = self._experts_bytes[cap]
        # Account a growth before it happens and a shrink after, so that the arena is never below what is backed.
        if after_bytes > before_bytes:
            self.arena.set_expert_bytes(after_bytes)
        try:
            with self._moving_pages():
                self._experts.set_cap(cap)
        finally:
            self.arena.set_expert_bytes(self._experts_bytes[self._experts.cap])

    def map_groups(self, groups: list[int]) -> None:
        """Back ``groups`` with zero pages. Raises CapacityError or MemoryError with nothing changed."""
        self.check_usable()
        self.arena.add_kv_groups(groups)
        try:
            with self._moving_pages():
                self._region.back(self.geometry.ranges(groups))
        except MemoryError:
            self.arena.remove_kv_groups(groups)
            raise

    def unmap_groups(self, groups: list[int]) -> None:
        """Return the pages of ``groups``; their blocks must be out of vLLM's pool, and no step may be writing."""
        self.check_usable()
        if NULL_GROUP in groups:
            raise IntegrityError("the null block's group must stay backed")
        if not self.arena.kv_groups.issuperset(groups):
            raise IntegrityError(f"KV groups without pages: {sorted(set(groups) - self.arena.kv_groups)}")
        with self._moving_pages():
            self._region.release(self.geometry.ranges(groups))
        self.arena.remove_kv_groups(groups)

    def report(self) -> MemoryReport:
        """Sizes now."""
        self.check_usable()
        return MemoryReport(
            cap=self._experts.cap,
            kv_groups=tuple(sorted(self.arena.kv_groups)),
            resident_bytes=self._experts.resident_bytes() + self._region.resident_bytes(),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError when pages are counted twice, lost, or resident beyond what is accounted."""
        self.check_usable()
        self._experts.check_integrity()
        if self.arena.expert_bytes != self._experts_bytes[self._experts.cap]:
            raise IntegrityError(f"the arena accounts {self.arena.expert_bytes} bytes to cap {self._experts.cap}")
        if NULL_GROUP not in self.arena.kv_groups:
            raise IntegrityError("the null block's group has no pages")
        self.arena.check_integrity(
            resident_expert_bytes=self._experts.resident_bytes(), resident_kv_bytes=self._region.resident_bytes()
        )

    @contextmanager
    def _moving_pages(self) -> Iterator[None]:
        """Remember any failure but a refusal, which comes before the first page moves."""
        try:
            yield
        except (ConfigurationError, MemoryError):
            raise
        except Exception as error:
            self._failure = error
            raise
