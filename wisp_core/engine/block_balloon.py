"""The scheduler's side of the KV balloon: takes whole groups of free blocks out of vLLM's pool and gives them back.

vLLM keeps its block tables, ids and hashes for the whole address range; a taken block is simply one that is always
in use. Only public methods of the pool are called, and the pool's own block count and watermark follow each change,
since usage, prefix-cache reset and admission are computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wisp_core.errors import IntegrityError
from wisp_core.memory.balloon import NULL_GROUP, free_groups


class BlockBalloon:
    """Groups of blocks that are out of the pool. Runs in the engine loop, between steps."""

    def __init__(
        self, kv_cache_manager: Any, *, watermark: float, blocks_to_copy: Callable[[], set[int]] = set
    ) -> None:
        """Wrap vLLM's ``KVCacheManager``.

        Args:
            kv_cache_manager: vLLM's.
            watermark: Fraction of the pool that vLLM keeps free on admission.
            blocks_to_copy: Free blocks whose content is still needed, as by a copy to host memory; not to be taken.
        """
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self._watermark = watermark
        self._blocks_to_copy = blocks_to_copy
        self._group_blocks: int | None = None
        self._taken: set[int] = set()

    @property
    def taken(self) -> list[int]:
        """Groups that are out of the pool, ascending."""
        return sorted(self._taken)

    @property
    def group_blocks(self) -> int:
        """Blocks per group. Raises IntegrityError before `configure`."""
        if self._group_blocks is None:
            raise IntegrityError("the KV balloon was used before its group size was set")
        return self._group_blocks

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can use: the null block is not one of them."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold now; shared ones count once."""
        return self.usable_blocks - int(self._pool.get_num_free_blocks())

    def num_cached_blocks(self) -> int:
        """Free blocks that still hold a reusable prefix."""
        return sum(block.ref_cnt == 0 and block.block_hash is not None for block in self._pool.blocks)

    def configure(self, group_blocks: int) -> None:
        """Set the group size, once. Raises ValueError when it changes or does not divide the pool."""
        if self._group_blocks not in (None, group_blocks) or len(self._pool.blocks) % group_blocks:
            raise ValueError(
                f"group_blocks {group_blocks} for {len(self._pool.blocks)} blocks, was {self._group_blocks}"
            )
        self._group_blocks = group_blocks

    def available_groups(self) -> list[int]:
        """Wholly free groups whose content nobody needs, those to take first in front."""
        needed = self._blocks_to_copy()
        queue = [one for one in self._pool.free_block_queue.get_all_free_blocks() if one.block_id not in needed]
        are_cached = [block.block_hash is not None for block in queue]
        return free_groups([block.block_id for block in queue], are_cached, self.group_blocks)

    def take(self, groups: list[int]) -> None:
        """Take wholly free ``groups``; cached prefixes in them are forgotten."""
        blocks = self._blocks(groups)
        if NULL_GROUP in groups or self._taken.intersection(groups) or any(block.ref_cnt for block in blocks):
            raise IntegrityError(f"KV groups {groups} are not all free")
        if needed := self._blocks_to_copy().intersection(block.block_id for block in blocks):
            raise IntegrityError(f"KV blocks {sorted(needed)} are still to be copied to host memory")
        # Evict before touching: a prefix hit on a block that is out of the pool would silently use it.
        self._pool.evict_blocks({block.block_id for block in blocks})
        self._pool.touch(blocks)
        self._taken.update(groups)
        self._resize_pool(-len(blocks))

    def give(self, groups: list[int]) -> None:
        """Put taken ``groups`` back; their pages must be backed and zero by now."""
        if not self._taken.issuperset(groups):
            raise IntegrityError(f"KV groups {sorted(set(groups) - self._taken)} are not out of the pool")
        blocks = self._blocks(groups)
        self._taken.difference_update(groups)
        self._resize_pool(len(blocks))
        self._pool.free_blocks(blocks)

    def check_integrity(self) -> None:
        """Prove free + used + taken = all, and that no taken block is free, cached or used by a request."""
        taken = self._blocks(self.taken) if self._taken else []
        bad = [block.block_id for block in taken if block.ref_cnt != 1 or block.block_hash is not None]
        if bad:
            raise IntegrityError(f"taken blocks are also in use: {bad}")
        free = self._pool.free_block_queue.get_all_free_blocks()
        if len(free) != self._pool.get_num_free_blocks() or len({block.block_id for block in free}) != len(free):
            raise IntegrityError(
                f"vLLM's free list holds {len(free)} blocks, counts {self._pool.get_num_free_blocks()}"
            )
        held = sum(block.ref_cnt > 0 or block.is_null for block in self._pool.blocks)
        if held + len(free) != len(self._pool.blocks):
            raise IntegrityError(f"held {held} + free {len(free)} != {len(self._pool.blocks)} blocks")
        if self._pool.num_gpu_blocks + len(taken) != len(self._pool.blocks):
            raise IntegrityError(f"pool {self._pool.num_gpu_blocks} + taken {len(taken)} != {len(self._pool.blocks)}")

    def _blocks(self, groups: list[int]) -> list[Any]:
        size = self.group_blocks
        return [block for group in groups for block in self._pool.blocks[group * size : (group + 1) * size]]

    def _resize_pool(self, change: int) -> None:
        self._pool.num_gpu_blocks += change
        self._manager.watermark_blocks = int(self._watermark * self._pool.num_gpu_blocks)
