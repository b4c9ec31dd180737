"""Backs a mapping's pages at once, by several threads: one page fault after the other takes a minute for 57 GB."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

_CHUNK_BYTES = 128 << 20
_MAX_THREADS = 16  # the memory's bandwidth, not the cores, is the limit before that
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it


def populate(address: int, num_bytes: int) -> None:
    """Back ``[address, address + num_bytes)``, writable and with huge pages where the system allows them.

    The content stays. ``address`` must start on a page. Raises OSError when pages are refused, as on a full memory file
    system, where touching them later would kill the process; some pages may then be backed. Does nothing on kernels
    that do not know how: there pages come when they are touched.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def advise(start: int, size: int, advice: int) -> int:
        return ctypes.get_errno() if libc.madvise(start, size, advice) else 0

    advise(address, num_bytes, mmap.MADV_HUGEPAGE)  # a wish: not every file system or kernel grants it
    chunks = [
        (address + start, min(_CHUNK_BYTES, num_bytes - start), _MADV_POPULATE_WRITE)
        for start in range(0, num_bytes, _CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for problem in pool.map(lambda chunk: advise(*chunk), chunks):
            if problem not in (0, errno.EINVAL):
                raise OSError(problem, os.strerror(problem))
