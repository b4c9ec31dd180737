"""The arena: one budget of pages, held by an expert pool and a KV pool, which trade pages through the free ones.

Pure accounting. It counts pages and never slots or blocks, since neither need fill whole pages: the expert pool is
one extent of pages, the KV pool is a set of groups of equal size, and whoever moves memory tells the arena first
when a pool grows and last when it shrinks. So what is accounted is never less than what is backed.
"""

from __future__ import annotations

from collections.abc import Iterable

from wisp_core.errors import CapacityError, IntegrityError


class Arena:
    """Divides ``budget_bytes`` between experts and KV, in pages."""

    def __init__(self, *, budget_bytes: int, page_bytes: int, kv_group_bytes: int) -> None:
        """Start with every page free.

        Args:
            budget_bytes: What both pools may hold together; a part of a page at the end is not used.
            page_bytes: Smallest unit that can be given back to the system.
            kv_group_bytes: Size of one KV group over all layers, whole pages.
        """
        if kv_group_bytes % page_bytes != 0:
            raise ValueError(f"kv_group_bytes {kv_group_bytes} is not a multiple of page_bytes {page_bytes}")
        self.page_bytes = page_bytes
        self.total_pages = budget_bytes // page_bytes
        self.kv_group_pages = kv_group_bytes // page_bytes
        self._free_pages = self.total_pages
        self._expert_pages = 0
        self._kv_groups: set[int] = set()

    @property
    def free_bytes(self) -> int:
        """Bytes that neither pool holds."""
        return self._free_pages * self.page_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes accounted to the expert pool."""
        return self._expert_pages * self.page_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes accounted to the KV pool."""
        return len(self._kv_groups) * self.kv_group_pages * self.page_bytes

    @property
    def kv_groups(self) -> frozenset[int]:
        """The KV groups that hold pages."""
        return frozenset(self._kv_groups)

    def set_expert_bytes(self, num_bytes: int) -> None:
        """Make the expert pool ``num_bytes`` large, rounded up to pages. Raises CapacityError, nothing changed."""
        pages = -(-num_bytes // self.page_bytes)
        self._claim(pages - self._expert_pages, "the expert pool")
        self._expert_pages = pages

    def add_kv_groups(self, groups: Iterable[int]) -> None:
        """Account pages to ``groups``. Raises CapacityError or, for a group that has pages, IntegrityError."""
        added = list(groups)
        if len(set(added)) != len(added) or self._kv_groups.intersection(added):
            raise IntegrityError(f"KV groups counted twice: {added}")
        self._claim(len(added) * self.kv_group_pages, "the KV pool")
        self._kv_groups.update(added)

    def remove_kv_groups(self, groups: Iterable[int]) -> None:
        """Free the pages of ``groups``. Raises IntegrityError for a group that has none."""
        removed = list(groups)
        if len(set(removed)) != len(removed) or not self._kv_groups.issuperset(removed):
            raise IntegrityError(f"KV groups without pages: {removed}")
        self._kv_groups.difference_update(removed)
        self._free_pages += len(removed) * self.kv_group_pages

    def check_integrity(self, *, resident_expert_bytes: int = 0, resident_kv_bytes: int = 0) -> None:
        """Prove free + used = total, and that no pool holds more memory than it is accounted.

        Args:
            resident_expert_bytes: What the system counts in the expert pool's mappings.
            resident_kv_bytes: What the system counts in the KV pool's mapping.

        Raises:
            IntegrityError: With the numbers.
        """
        used_pages = self._expert_pages + len(self._kv_groups) * self.kv_group_pages
        if self._free_pages < 0 or self._free_pages + used_pages != self.total_pages:
            raise IntegrityError(f"free {self._free_pages} + used {used_pages} pages != total {self.total_pages}")
        if resident_expert_bytes > self.expert_bytes:
            raise IntegrityError(f"experts: {resident_expert_bytes} bytes resident, {self.expert_bytes} accounted")
        if resident_kv_bytes > self.kv_bytes:
            raise IntegrityError(f"KV: {resident_kv_bytes} bytes resident, {self.kv_bytes} accounted")

    def _claim(self, pages: int, claimant: str) -> None:
        if pages > self._free_pages:
            missing_bytes = (pages - self._free_pages) * self.page_bytes
            raise CapacityError(
                f"{claimant} asks for {pages * self.page_bytes} bytes, {self.free_bytes} are free of "
                f"{self.total_pages * self.page_bytes}: {missing_bytes} too few"
            )
        self._free_pages -= pages
