"""memfd regions: pages really come and go, as the system counts them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wisp_core.memory.memfd import MAPPING_PREFIX, MemfdBacking, MemfdRegion
from wisp_core.memory.smaps import resident_bytes

PAGE = mmap.PAGESIZE


def rss(name: str) -> int:
    return resident_bytes(os.getpid(), MAPPING_PREFIX + name)


def test_reserving_costs_nothing_and_backing_costs_its_pages() -> None:
    region = MemfdBacking().reserve("unit-a", 64 * PAGE + 1)
    assert region.num_bytes == 65 * PAGE
    assert (region.resident_bytes(), rss("unit-a")) == (0, 0)
    region.back([(0, 8 * PAGE), (16 * PAGE, 20 * PAGE)])
    assert (region.resident_bytes(), rss("unit-a")) == (12 * PAGE, 12 * PAGE)


def test_release_returns_pages_and_they_come_back_as_zeros() -> None:
    region = MemfdBacking().reserve("unit-b", 8 * PAGE)
    region.back([(0, 8 * PAGE)])
    tensor = region.tensor()
    tensor.fill_(7)
    region.release([(2 * PAGE, 6 * PAGE)])
    assert (region.resident_bytes(), rss("unit-b")) == (4 * PAGE, 4 * PAGE)
    region.back([(0, 8 * PAGE)])  # pages that were never released keep their content
    expected = torch.full((8 * PAGE,), 7, dtype=torch.int8)
    expected[2 * PAGE : 6 * PAGE] = 0
    assert torch.equal(tensor, expected)


pages = st.tuples(st.integers(0, 16), st.integers(0, 16)).map(lambda p: (min(p) * PAGE, max(p) * PAGE))


@settings(max_examples=40)
@given(commands=st.lists(st.tuples(st.booleans(), st.lists(pages, max_size=3)), max_size=12))
def test_resident_bytes_follow_any_sequence(commands: list[tuple[bool, list[tuple[int, int]]]]) -> None:
    region = MemfdRegion("unit-c", 16 * PAGE)
    backed: set[int] = set()
    for is_back, ranges in commands:
        touched = {page for start, stop in ranges for page in range(start // PAGE, stop // PAGE)}
        (region.back if is_back else region.release)(ranges)
        backed = backed | touched if is_back else backed - touched
        assert region.resident_bytes() == len(backed) * PAGE


def test_a_stray_write_shows_in_resident_bytes() -> None:
    region = MemfdRegion("unit-d", 4 * PAGE)
    region.back([(0, PAGE)])
    region.tensor()[3 * PAGE] = 1
    assert region.resident_bytes() == 2 * PAGE


@pytest.mark.parametrize("bad", [(1, PAGE), (0, PAGE + 1), (0, 5 * PAGE), (2 * PAGE, PAGE)])
def test_ranges_must_be_pages_of_the_region(bad: tuple[int, int]) -> None:
    region = MemfdRegion("unit-e", 4 * PAGE)
    with pytest.raises(ValueError, match="page-aligned"):
        region.back([bad])
    with pytest.raises(ValueError, match="page-aligned"):
        region.release([bad])


def test_refused_pages_leave_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    region = MemfdRegion("unit-h", 16 * PAGE)
    region.back([(0, PAGE)])
    region.tensor()[0] = 5
    allocate = os.posix_fallocate

    def refuse_the_end(fd: int, start: int, num_bytes: int) -> None:
        if start + num_bytes > 12 * PAGE:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        allocate(fd, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", refuse_the_end)
    with pytest.raises(MemoryError, match=r"region 'unit-h': .* refused: Cannot allocate memory"):
        region.back([(0, 4 * PAGE), (6 * PAGE, 8 * PAGE), (8 * PAGE, 16 * PAGE)])
    assert region.resident_bytes() == PAGE
    assert region.tensor()[0] == 5


def test_another_process_counts_what_this_one_holds_and_a_gone_one_holds_nothing() -> None:
    region = MemfdRegion("unit-f", 32 * PAGE)
    region.back([(0, 32 * PAGE)])
    code = f"from wisp_core.memory.smaps import resident_bytes as r; print(r({os.getpid()}, '/memfd:wisp-unit-f'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 32 * PAGE
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert resident_bytes(child.pid) == 0


def test_dropping_the_region_and_its_tensors_gives_the_memory_back() -> None:
    region = MemfdRegion("unit-g", 16 * PAGE)
    region.back([(0, 16 * PAGE)])
    tensor = region.tensor()
    fd = region._fd
    del region
    gc.collect()
    assert rss("unit-g") == 16 * PAGE  # the tensor keeps the mapping
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    del tensor
    gc.collect()
    assert rss("unit-g") == 0
