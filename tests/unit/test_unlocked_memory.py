"""Where CUDA does not lock host memory, experts stay in ordinary memory and the engine says so, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from wisp_core.pager.pinned_memory import PinnedMemory

SHAPE, DTYPE = (4, 1000), torch.bfloat16
LOGGER = "vllm.wisp_core.pager.pinned_memory"


class Cudart:
    """Locks so many tensors and no more."""

    def __init__(self, can_lock: int) -> None:
        self.can_lock, self.asked = can_lock, 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.asked += 1
        return 0 if self.asked <= self.can_lock else 2

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        return 0


def check(status: int) -> None:
    if status:
        raise RuntimeError("out of memory")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the module, whatever logging is set up."""
    said: list[str] = []

    def warning(text: str, *values: Any) -> None:
        said.append(text % values)

    monkeypatch.setattr(logging.getLogger(LOGGER), "warning", warning)
    return said


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart(can_lock=1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return runtime


def test_after_a_refusal_nothing_more_is_locked_and_everything_works(cudart: Cudart, heard: list[str]) -> None:
    memory = PinnedMemory(1 << 20)
    assert memory.empty(SHAPE, DTYPE).fill_(1).sum() == 4000
    assert memory.is_in_reach
    assert memory.empty(SHAPE, DTYPE).fill_(2).sum() == 8000
    assert not memory.is_in_reach
    assert memory.empty(SHAPE, DTYPE).fill_(3).sum() == 12000
    assert cudart.asked == 2
    assert memory.used_bytes == 3 * 8000
    assert len(heard) == 1
    assert "8000 bytes of host memory after 8000 (out of memory)" in heard[0]
    assert "ulimit -l" in heard[0]


def test_where_locking_is_off_nobody_is_asked(cudart: Cudart, heard: list[str]) -> None:
    memory = PinnedMemory(1 << 20, is_locking=False)
    memory.empty(SHAPE, DTYPE)
    assert not memory.is_in_reach
    assert cudart.asked == 0
    assert heard == []
