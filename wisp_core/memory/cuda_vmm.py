"""CUDA backend of `Region`: address ranges of virtual memory whose physical pages come and go.

A range is reserved once and keeps its address, so what a CUDA graph captured stays valid; pages of 4 MiB are mapped
into it and unmapped. Pages that a region releases stay with the backing, inside its budget, and the next region that is
backed gets them: moving memory between regions allocates nothing.
"""

from __future__ import annotations

import bisect
import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from cuda.bindings import driver

from wisp_core.memory.mappings import Mappings, PageRange
from wisp_core.memory.region import ByteRange

PAGE_GRANULES = 2
"""Page size in units of the driver's granularity (2 MiB). The driver's time goes by pages: 512 MiB move in 11.2, 5.6
and 2.9 ms at 2, 4 and 8 MiB (`device-pager-overhead-h200.json`). Each tensor of slots wastes half a page at its end."""

_LONGEST_FILLER_PAGES = 8
"""Length of the longest filler: one driver call maps so many page indices to it, and costs as much as for one."""


Fillers = dict[int, Any]
"""Physical memory by its length in pages; a driver mapping maps such a piece whole."""


def _call(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError, also for want of memory: what came before has had its effect."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


class _PagePool:
    """Physical pages of one device: free ones, and how many exist."""

    def __init__(self, device_index: int, page_granules: int) -> None:
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device_index
        self.access = driver.CUmemAccessDesc()
        self.access.location = self._properties.location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        granularity = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule_bytes = int(_call(driver.cuMemGetAllocationGranularity(self._properties, granularity)))
        self.page_bytes = page_granules * granule_bytes
        self.num_pages = 0
        self.free: list[Any] = []
        self._fillers: Fillers = {}

    def take(self, num_pages: int) -> list[Any]:
        """Pages with any content. Raises MemoryError with nothing changed."""
        created: list[Any] = []
        while len(self.free) + len(created) < num_pages:
            result = driver.cuMemCreate(self.page_bytes, self._properties, 0)
            if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                _release(created)
                raise MemoryError(f"CUDA driver: {result[0].name}")
            created.append(_call(result))
        self.num_pages += len(created)
        self.free += created
        taken = self.free[len(self.free) - num_pages :]
        del self.free[len(self.free) - num_pages :]
        return taken

    def fillers(self) -> Fillers:
        """One piece of each length that `Mappings` uses, always the same ones, which count as pages for good."""
        if not self._fillers:
            self._fillers = self._make_fillers()
            self.num_pages += sum(self._fillers)
        return self._fillers

    def _make_fillers(self) -> Fillers:
        """Pieces of zeros: even a stray read should find numbers."""
        lengths = [1 << power for power in range(_LONGEST_FILLER_PAGES.bit_length())]
        num_bytes = sum(lengths) * self.page_bytes
        address = int(_call(driver.cuMemAddressReserve(num_bytes, 0, 0, 0)))
        fillers: Fillers = {}
        for length in lengths:
            fillers[length] = _call(driver.cuMemCreate(length * self.page_bytes, self._properties, 0))
            start = address + (length - 1) * self.page_bytes  # the shorter ones come before
            _call(driver.cuMemMap(start, length * self.page_bytes, 0, fillers[length], 0))
        _call(driver.cuMemSetAccess(address, num_bytes, [self.access], 1))
        _call(driver.cuMemsetD8(address, 0, num_bytes))
        torch.cuda.synchronize()
        _unmap(address, self.page_bytes, ((length - 1, 2 * length - 1) for length in lengths))
        _call(driver.cuMemAddressFree(address, num_bytes))
        return fillers

    def trim(self) -> None:
        """Return the free pages to the driver."""
        _release(self.free)
        self.num_pages -= len(self.free)
        self.free.clear()


def _release(pages: list[Any]) -> None:
    for page in pages:
        _call(driver.cuMemRelease(page))


class _AddressRange:
    """A reserved range and what is mapped in it; torch keeps it alive as long as a tensor needs it.

    With ``fillers``, every page index that has no page of its own maps a page of those instead.
    """

    def __init__(self, num_bytes: int, pool: _PagePool, fillers: Fillers) -> None:
        self.num_pages = num_bytes // pool.page_bytes
        self.pages: dict[int, Any] = {}  # those backed
        self._pool = pool
        self._fillers = fillers
        self._filled = Mappings(_LONGEST_FILLER_PAGES)
        self._address = int(_call(driver.cuMemAddressReserve(num_bytes, pool.page_bytes, 0, 0)))
        # Not at exit: the driver may be gone by then, and the process's end frees everything.
        finalizer = weakref.finalize(self, _free, self._address, num_bytes, self.pages, pool, self._filled)
        finalizer.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        num_bytes = self.num_pages * self._pool.page_bytes
        return {"shape": (num_bytes,), "typestr": "|i1", "data": (self._address, False), "version": 3}

    def fill(self, start: int, stop: int) -> None:
        """Map fillers, if there are any, at page indices ``[start, stop)``, where nothing is mapped."""
        if not self._fillers or start == stop:
            return
        self._map_fillers(start, stop)
        self._allow_access(start, stop)

    def _map_fillers(self, start: int, stop: int) -> None:
        for first, last in self._filled.add(start, stop):
            self._map(first, last, self._fillers[last - first])

    def back(self, runs: list[PageRange], pages: list[Any]) -> None:
        """Map ``pages`` in order at ``runs``, ascending and apart, where no page is backed."""
        indices = [index for run in runs for index in range(*run)]
        backed = dict(zip(indices, pages, strict=True))
        spans = self._unfill(runs) if self._fillers else runs
        for index, page in backed.items():
            self._map(index, index + 1, page)
        # Driver calls cost by what was mapped, so each piece is mapped once and allowed with its neighbours.
        for start, stop in spans:
            for hole_start, hole_stop in _holes(start, stop, runs):
                self._map_fillers(hole_start, hole_stop)
            self._allow_access(start, stop)
        self.pages.update(backed)

    def _unfill(self, runs: list[PageRange]) -> list[PageRange]:
        """Unmap the fillers that reach into ``runs``; returns what they covered."""
        spans: list[PageRange] = []
        for start, stop in runs:
            cleared = spans[-1][1] if spans else start
            if stop <= cleared:
                continue
            fillers = self._filled.remove(max(start, cleared), stop)
            self._unmap(fillers)
            first, last = fillers[0][0], fillers[-1][1]
            if spans and first == cleared:
                spans[-1] = (spans[-1][0], last)
            else:
                spans.append((first, last))
        return spans

    def release(self, start: int, stop: int) -> list[Any]:
        """Unmap ``[start, stop)``, all of which is backed; returns the pages."""
        self._unmap((index, index + 1) for index in range(start, stop))
        self.fill(start, stop)
        return [self.pages.pop(index) for index in range(start, stop)]

    def _map(self, start: int, stop: int, physical: Any) -> None:
        page_bytes = self._pool.page_bytes
        _call(driver.cuMemMap(self._address + start * page_bytes, (stop - start) * page_bytes, 0, physical, 0))

    def _allow_access(self, start: int, stop: int) -> None:
        page_bytes = self._pool.page_bytes
        first = self._address + start * page_bytes
        _call(driver.cuMemSetAccess(first, (stop - start) * page_bytes, [self._pool.access], 1))

    def _unmap(self, mappings: Iterable[PageRange]) -> None:
        _unmap(self._address, self._pool.page_bytes, mappings)


def _free(address: int, num_bytes: int, pages: dict[int, Any], pool: _PagePool, filled: Mappings) -> None:
    """Unmap what is left of a range, keep its pages, and give the addresses back."""
    torch.cuda.synchronize()
    _unmap(address, pool.page_bytes, filled)
    _unmap(address, pool.page_bytes, ((index, index + 1) for index in pages))
    pool.free += pages.values()
    _call(driver.cuMemAddressFree(address, num_bytes))


def _unmap(address: int, page_bytes: int, mappings: Iterable[PageRange]) -> None:
    """Undo them one by one: of several undone by one call compute-sanitizer loses track, and it is hardly faster."""
    for start, stop in mappings:
        _call(driver.cuMemUnmap(address + start * page_bytes, (stop - start) * page_bytes))


class CudaRegion:
    """One reserved range; see `wisp_core.memory.region.Region` for the contract."""

    def __init__(self, name: str, num_bytes: int, pool: _PagePool, device: torch.device, fillers: Fillers) -> None:
        if num_bytes <= 0:
            raise ValueError(f"region {name!r}: num_bytes must be positive, got {num_bytes}")
        self.name = name
        self.page_bytes = pool.page_bytes
        self.num_bytes = -(-num_bytes // pool.page_bytes) * pool.page_bytes
        self._pool = pool
        self._device = device
        self._is_filled = bool(fillers)
        self._range = _AddressRange(self.num_bytes, pool, fillers)
        self._tensor = self._make_tensor()

    def tensor(self) -> torch.Tensor:
        """The whole range as an int8 tensor ``[num_bytes]``; only backed bytes may be touched."""
        return self._tensor

    def back(self, ranges: Iterable[ByteRange], *, is_zeroed: bool = True) -> None:
        """Give pages to ``ranges``; backed ones stay. New ones read as zeros, on any stream once this returns.

        Raises MemoryError with nothing changed when the device has no pages left.

        Args:
            ranges: bytes from the region's start, whole pages.
            is_zeroed: False: new pages may hold anything, for who writes before reading.
        """
        runs = list(_runs(self._pages(ranges) - self._range.pages.keys()))
        if not runs:
            return
        pages = self._pool.take(sum(stop - start for start, stop in runs))
        if self._is_filled:
            torch.cuda.synchronize(self._device)  # a stray access in flight may still need a filler
        self._range.back(runs, pages)
        if is_zeroed:
            # A page may still hold weights, and attention would multiply their NaN bit patterns by zero. All at once:
            # a launch for each of many short runs takes longer than the zeros.
            page_bytes = self.page_bytes
            torch._foreach_zero_([self._tensor[start * page_bytes : stop * page_bytes] for start, stop in runs])
            torch.cuda.current_stream(self._device).synchronize()

    def release(self, ranges: Iterable[ByteRange]) -> None:
        """Take the pages of ``ranges`` back; their content is lost.

        Waits for the device first, since a step in flight may still use them.
        """
        held = self._pages(ranges) & self._range.pages.keys()
        if not held:
            return
        torch.cuda.synchronize(self._device)
        for start, stop in _runs(held):
            self._pool.free += self._range.release(start, stop)

    def resident_bytes(self) -> int:
        """Bytes of physical memory mapped in this range."""
        return len(self._range.pages) * self.page_bytes

    def _make_tensor(self) -> torch.Tensor:
        # torch asks the driver whose memory the address is, so something must be mapped at that moment.
        self._range.fill(0, self._range.num_pages)
        self._range.back([(0, 1)], self._pool.take(1))
        tensor = torch.as_tensor(self._range, device=self._device)
        self._pool.free += self._range.release(0, 1)
        return tensor

    def _pages(self, ranges: Iterable[ByteRange]) -> set[int]:
        """Page indices of ``ranges``."""
        pages: set[int] = set()
        for start, stop in ranges:
            if start % self.page_bytes or stop % self.page_bytes or not 0 <= start <= stop <= self.num_bytes:
                raise ValueError(
                    f"region {self.name!r}: [{start}, {stop}) is not page-aligned inside [0, {self.num_bytes})"
                )
            pages.update(range(start // self.page_bytes, stop // self.page_bytes))
        return pages


def _runs(pages: set[int]) -> Iterator[PageRange]:
    """Maximal runs of consecutive indices, ascending."""
    start = stop = -1
    for page in sorted(pages):
        if page != stop:
            if stop > start:
                yield start, stop
            start = page
        stop = page + 1
    if stop > start:
        yield start, stop


def _holes(start: int, stop: int, runs: list[PageRange]) -> Iterator[PageRange]:
    """The parts of ``[start, stop)`` between ``runs``, which ascend and lie apart."""
    at = start
    for run_start, run_stop in runs[bisect.bisect_left(runs, (start, start)) :]:
        if run_start >= stop:
            break
        if at < run_start:
            yield at, run_start
        at = run_stop
    if at < stop:
        yield at, stop


class CudaBacking:
    """Makes regions of one device that share their physical pages."""

    def __init__(
        self, device: torch.device | str, *, has_filler: bool = False, page_granules: int = PAGE_GRANULES
    ) -> None:
        """Use ``device``.

        Args:
            device: a CUDA device.
            has_filler: map a few shared pages at every address that is not backed, so that a stray access (a padded
                row's, say) hits nothing; without it such an access faults.
            page_granules: page size, see `PAGE_GRANULES`; a power of two.
        """
        self.device = torch.device(device)
        torch.zeros(1, device=self.device)  # the driver calls need the device's context
        index = self.device.index
        self._pool = _PagePool(torch.cuda.current_device() if index is None else index, page_granules)
        self._fillers = self._pool.fillers() if has_filler else {}
        self.page_bytes = self._pool.page_bytes

    def reserve(self, name: str, num_bytes: int) -> CudaRegion:
        """Reserve ``num_bytes`` (rounded up to whole pages), nothing backed."""
        return CudaRegion(name, num_bytes, self._pool, self.device, self._fillers)

    def with_filler(self) -> CudaBacking:
        """A backing with the same pages whose regions have fillers."""
        backing = copy.copy(self)
        backing._fillers = self._pool.fillers()
        return backing

    def physical_bytes(self) -> int:
        """Bytes of all pages that exist: mapped in some region, free for the next, and the fillers."""
        return self._pool.num_pages * self.page_bytes

    def trim(self) -> None:
        """Return the pages that no region holds to the driver."""
        self._pool.trim()
