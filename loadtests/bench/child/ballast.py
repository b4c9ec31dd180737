"""A process that holds the card's memory, so that an engine that takes more than its budget fails."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


@contextmanager
def ballast(left_bytes: int) -> Iterator[int]:
    """A process that leaves ``left_bytes`` of the card free. Call it before this process uses CUDA."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        _hold_the_rest(left_bytes, writes)
    try:
        os.close(writes)
        with os.fdopen(reads) as answers:
            yield int(answers.readline() or 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _hold_the_rest(left_bytes: int, writes: int) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    free_bytes, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free_bytes - left_bytes), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    os.write(writes, f"{held.numel()}\n".encode())
    while True:
        signal.pause()
