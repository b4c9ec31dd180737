"""CPU backend of `Region`: page-aligned memfd mappings whose pages really come and go.

Each region is one anonymous file, mapped shared, so that it shows as ``/memfd:wisp-<name>`` in ``/proc/PID/smaps``
and another process can count what it holds. A shared mapping keeps its pages under MADV_DONTNEED; only punching a
hole in the file (MADV_REMOVE) gives them back.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from wisp_core.memory.populate import populate_here
from wisp_core.memory.region import ByteRange

MAPPING_PREFIX = "/memfd:wisp-"
"""How every region's name starts in ``/proc/PID/smaps``."""


class MemfdRegion:
    """One reserved range; see `wisp_core.memory.region.Region` for the contract."""

    def __init__(self, name: str, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise ValueError(f"region {name!r}: num_bytes must be positive, got {num_bytes}")
        self.name = name
        self.page_bytes = mmap.PAGESIZE
        self.num_bytes = -(-num_bytes // self.page_bytes) * self.page_bytes
        self._fd = os.memfd_create(f"wisp-{name}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, self.num_bytes)
        self._map = mmap.mmap(self._fd, self.num_bytes, flags=mmap.MAP_SHARED)
        self._address = self.tensor().data_ptr()
        self._is_backed = np.zeros(self.num_bytes // self.page_bytes, dtype=np.bool_)

    def tensor(self) -> torch.Tensor:
        """The whole range as an int8 tensor ``[num_bytes]``; it keeps the mapping alive."""
        return torch.frombuffer(self._map, dtype=torch.int8)

    def back(self, ranges: Iterable[ByteRange], *, is_zeroed: bool = True) -> None:
        """Give pages to ``ranges``; new ones read as zeros, asked for or not; backed ones keep their content.

        Raises MemoryError with nothing changed when the system has no pages left.
        """
        gaps = [gap for start, stop in ranges for gap in self._gaps(start, stop)]
        done: list[ByteRange] = []
        for start, stop in gaps:
            try:
                os.posix_fallocate(self._fd, start, stop - start)
            except OSError as error:
                self.release(done)
                raise MemoryError(f"region {self.name!r}: {stop - start} bytes refused: {error.strerror}") from error
            self._is_backed[start // self.page_bytes : stop // self.page_bytes] = True
            done.append((start, stop))
        for start, stop in done:
            # Into this process's page table too, so that Rss counts them at once.
            populate_here(self._address + start, stop - start)

    def release(self, ranges: Iterable[ByteRange]) -> None:
        """Return the pages of ``ranges`` to the system; their content is lost."""
        for start, stop in ranges:
            self._check(start, stop)
            if stop > start:
                self._map.madvise(mmap.MADV_REMOVE, start, stop - start)
                self._is_backed[start // self.page_bytes : stop // self.page_bytes] = False

    def resident_bytes(self) -> int:
        """Bytes of memory the file occupies, as the system counts them (touched or not, stray writes included)."""
        return os.fstat(self._fd).st_blocks * 512

    def _gaps(self, start: int, stop: int) -> Iterator[ByteRange]:
        """Maximal unbacked parts of ``[start, stop)``."""
        self._check(start, stop)
        first = start // self.page_bytes
        backed = self._is_backed[first : stop // self.page_bytes]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], backed, [True])).astype(np.int8)))
        for gap_start, gap_stop in edges.reshape(-1, 2).tolist():
            yield (first + gap_start) * self.page_bytes, (first + gap_stop) * self.page_bytes

    def _check(self, start: int, stop: int) -> None:
        if start % self.page_bytes or stop % self.page_bytes or not 0 <= start <= stop <= self.num_bytes:
            raise ValueError(
                f"region {self.name!r}: [{start}, {stop}) is not page-aligned inside [0, {self.num_bytes})"
            )


class MemfdBacking:
    """Makes memfd regions."""

    page_bytes = mmap.PAGESIZE

    def reserve(self, name: str, num_bytes: int) -> MemfdRegion:
        """Reserve ``num_bytes`` (rounded up to whole pages) as ``/memfd:wisp-<name>``, nothing backed."""
        return MemfdRegion(name, num_bytes)
