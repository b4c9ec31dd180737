"""The slots of one layer: tensors with room for every expert, of which only the first ``cap`` have pages."""

from __future__ import annotations

import math

import torch

from wisp_core.memory.layout import slots_bytes, whole_pages
from wisp_core.memory.region import Backing, ByteRange
from wisp_core.pager.host_store import HostStore
from wisp_core.pager.slot_table import Copy, SlotMove


class LayerSlots:
    """Slot tensors of one layer in one region; each parameter starts on a page of its own.

    The tensors keep the shape [E, ...] of the parameters they replace, so the kernel chooses the same configuration
    as with all experts resident. Only slots below the cap may be touched.
    """

    def __init__(self, name: str, store: HostStore, backing: Backing, *, is_host_in_reach: bool = False) -> None:
        """Reserve the address range, nothing backed: call `back` before use.

        With ``is_host_in_reach`` each parameter lies a whole number of its rows away from its host tensor, so that a
        kernel can address rows of either from slot 0 (host tensors must then start on the backing's pages).
        """
        self._store = store
        self._page_bytes = backing.page_bytes
        self._shapes = store.shapes
        sizes = {name: self._whole_pages(s.expert_bytes * store.num_experts) for name, s in self._shapes.items()}
        spare = sum(self._row_pages(s.expert_bytes) for s in self._shapes.values()) if is_host_in_reach else 0
        self.region = backing.reserve(name, sum(sizes.values()) + spare * self._page_bytes)
        self._starts: dict[str, int] = {}
        start = 0
        for parameter, size in sizes.items():
            self._starts[parameter] = start + (self._pages_to_reach(parameter, start) if is_host_in_reach else 0)
            start = self._starts[parameter] + size
        self.tensors = {parameter: self._view(parameter) for parameter in self._shapes}
        self._rows = {parameter: list(tensor.unbind(0)) for parameter, tensor in self.tensors.items()}
        self._pairs = [(self._store.rows(parameter), self._rows[parameter]) for parameter in self._shapes]

    def bytes_at(self, cap: int) -> int:
        """Bytes of pages that ``cap`` slots take."""
        return slots_bytes((shape.expert_bytes for shape in self._shapes.values()), cap, self._page_bytes)

    def back(self, old_cap: int, new_cap: int) -> None:
        """Give pages to slots up to ``new_cap``. Raises MemoryError with nothing changed."""
        # A slot is written before it is read; only the first is read by padding rows before anything came.
        self.region.back(self._ranges(old_cap, new_cap), is_zeroed=old_cap == 0)

    def release(self, old_cap: int, new_cap: int) -> None:
        """Return the pages that only slots from ``new_cap`` on lie in."""
        self.region.release(self._ranges(new_cap, old_cap))

    def copy_in(self, copies: list[Copy]) -> None:
        """Copy experts from the host into slots, in order."""
        for host, slots in self._pairs:
            for expert, slot in copies:
                slots[slot].copy_(host[expert])

    def move(self, moves: list[SlotMove]) -> None:
        """Copy slots onto slots."""
        for slots in self._rows.values():
            for source, target in moves:
                slots[target].copy_(slots[source])

    def _ranges(self, low_cap: int, high_cap: int) -> list[ByteRange]:
        """Pages that ``high_cap`` slots need and ``low_cap`` slots do not."""
        ranges = []
        for parameter, shape in self._shapes.items():
            start = self._starts[parameter]
            low = start + self._whole_pages(shape.expert_bytes * low_cap)
            high = start + self._whole_pages(shape.expert_bytes * high_cap)
            if high > low:
                ranges.append((low, high))
        return ranges

    def _view(self, parameter: str) -> torch.Tensor:
        shape, start = self._shapes[parameter], self._starts[parameter]
        flat = self.region.tensor()[start : start + shape.expert_bytes * self._store.num_experts]
        return flat.view(shape.dtype).view(shape.shape)

    def _row_pages(self, row_bytes: int) -> int:
        """After how many pages an address has the same place in a row again."""
        return row_bytes // math.gcd(row_bytes, self._page_bytes)

    def _pages_to_reach(self, parameter: str, start: int) -> int:
        """Bytes of pages to leave out at ``start`` of the region, address range only."""
        row_bytes = self._shapes[parameter].expert_bytes
        distance = self._store.address(parameter) - self.region.tensor().data_ptr() - start
        for num_pages in range(self._row_pages(row_bytes)):
            if (distance - num_pages * self._page_bytes) % row_bytes == 0:
                return num_pages * self._page_bytes
        raise ValueError(f"the host tensor of {parameter} does not start on a page of {self._page_bytes} bytes")

    def _whole_pages(self, num_bytes: int) -> int:
        return whole_pages(num_bytes, self._page_bytes)
