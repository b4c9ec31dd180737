"""Reserved address ranges of which only some pages are backed: what slots and KV tensors lie in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

ByteRange = tuple[int, int]
"""Half-open ``[start, stop)`` in bytes from the region's start, page-aligned at both ends."""


class Region(Protocol):
    """One reserved range, whose address never changes."""

    name: str
    num_bytes: int
    page_bytes: int

    def tensor(self) -> torch.Tensor:
        """The whole range as an int8 tensor ``[num_bytes]``; only backed bytes may be touched."""
        ...

    def back(self, ranges: Iterable[ByteRange], *, is_zeroed: bool = True) -> None:
        """Give pages to ``ranges``. Raises MemoryError with nothing changed; after any other error, some may be backed.

        New pages read as zeros; without ``is_zeroed`` they may hold anything, which is faster on a GPU.
        """
        ...

    def release(self, ranges: Iterable[ByteRange]) -> None:
        """Return the pages of ``ranges`` to the system; their content is lost."""
        ...

    def resident_bytes(self) -> int:
        """Bytes of this range that really occupy memory, as the system counts them."""
        ...


class Backing(Protocol):
    """Where regions come from: memfd mappings on CPU, CUDA virtual memory on a GPU."""

    page_bytes: int

    def reserve(self, name: str, num_bytes: int) -> Region:
        """Reserve ``num_bytes`` (rounded up to whole pages), nothing backed."""
        ...


class FillableBacking(Backing, Protocol):
    """A backing whose regions may have a filler: one shared page at every address that is not backed."""

    def with_filler(self) -> Backing:
        """A backing with the same pages whose regions have a filler."""
        ...

    def trim(self) -> None:
        """Give pages that no region holds back to the system."""
        ...
