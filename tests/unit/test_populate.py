"""Pages of a mapping are backed at once, and a full file system is an error instead of a killed process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from wisp_core.memory.populate import populate

SIZE = 8 << 20


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def memory_file() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def test_every_page_is_backed_and_content_stays(memory_file: int) -> None:
    os.pwrite(memory_file, b"kept", SIZE - 4)
    mapping = mmap.mmap(memory_file, SIZE)
    before = resident_bytes(memory_file)
    populate(address_of(mapping), SIZE)
    assert before < resident_bytes(memory_file) == SIZE
    assert mapping[-4:] == b"kept"
    assert mapping[:4] == bytes(4)


def test_pages_that_do_not_exist_are_refused(memory_file: int) -> None:
    """Past a file's end, as on a full file system, a touch would raise SIGBUS."""
    mapping = mmap.mmap(memory_file, SIZE)
    os.ftruncate(memory_file, SIZE // 2)
    with pytest.raises(OSError, match="Bad address"):
        populate(address_of(mapping), SIZE)


def test_private_memory_counts_as_resident() -> None:
    mapping = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(mapping)
    assert resident_pages(address) == 0
    populate(address, SIZE)
    assert resident_pages(address) == SIZE // mmap.PAGESIZE


def resident_pages(address: int) -> int:
    """Those of the mapping alone: whatever else this process frees and takes meanwhile."""
    found = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), found) == 0
    return sum(state & 1 for state in found)
