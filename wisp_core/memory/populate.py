"""Backs a mapping's pages at once, by several threads: one page fault after the other takes a minute for 57 GB."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

_CHUNK_BYTES = 128 << 20
_MAX_THREADS = 16  # the memory's bandwidth, not the cores, is the limit before that
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate_here(address: int, num_bytes: int) -> None:
    """Back ``[address, address + num_bytes)`` from this thread, writable; the content stays.

    Raises OSError when pages are refused; some may then be backed. Does nothing on kernels that do not know how: there
    pages come when they are touched.
    """
    problem = _advise(address, num_bytes, _MADV_POPULATE_WRITE)
    if problem not in (0, errno.EINVAL):
        raise OSError(problem, os.strerror(problem))


def populate(address: int, num_bytes: int) -> None:
    """`populate_here` by several threads, and with huge pages where the system allows them.

    ``address`` must start on a page. On a full memory file system touching the pages later would kill the process.
    """
    _advise(address, num_bytes, mmap.MADV_HUGEPAGE)  # a wish: not every file system or kernel grants it
    starts = range(0, num_bytes, _CHUNK_BYTES)
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        done = pool.map(lambda at: populate_here(address + at, min(_CHUNK_BYTES, num_bytes - at)), starts)
        deque(done, maxlen=0)


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """The error's number, 0 for none."""
    return ctypes.get_errno() if _LIBC.madvise(address, num_bytes, advice) else 0
