"""Page-locked memory that replicas share: counted once, on a memory file system only. Locking itself needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from wisp_core.errors import ConfigurationError
from wisp_core.pager import pinned_memory
from wisp_core.pager.host_files import ALIGNMENT_BYTES, HostFiles
from wisp_core.pager.pinned_memory import PinnedMemory

SHAPE, DTYPE = (4, 1000), torch.bfloat16
NUM_BYTES = 8000


@pytest.fixture
def root() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def locked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors that would have been locked."""
    tensors: list[torch.Tensor] = []

    def lock(_: PinnedMemory, tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    monkeypatch.setattr(PinnedMemory, "_lock", lock)
    return tensors


def open_files(root: Path) -> HostFiles:
    return HostFiles(root, subject={"model": "m"}, version={"files": 1})


def test_what_another_process_has_loaded_is_locked_but_not_counted(root: Path, locked: list[torch.Tensor]) -> None:
    writer = PinnedMemory(NUM_BYTES, open_files(root))
    with writer.creating():
        weight = torch.empty(SHAPE, dtype=DTYPE)
    weight.fill_(3)
    assert weight.data_ptr() % ALIGNMENT_BYTES == 0
    assert writer.publish(0, {"w13_weight": weight})["w13_weight"] is weight
    writer.finish()
    user = PinnedMemory(0, open_files(root))
    assert user.is_filled
    with user.creating():
        unused = torch.empty(SHAPE, dtype=DTYPE)
    assert unused.data_ptr() % ALIGNMENT_BYTES, "vLLM's parameters are stand-ins that nobody loads"
    found = user.attach(0)["w13_weight"]
    assert torch.equal(found, weight)
    assert [tensor.data_ptr() for tensor in locked] == [weight.data_ptr(), found.data_ptr()]


def test_the_writer_is_refused_before_the_machine_runs_out(root: Path) -> None:
    writer = PinnedMemory(NUM_BYTES - 1, open_files(root))
    with pytest.raises(ConfigurationError, match=f"takes {NUM_BYTES} bytes, but {NUM_BYTES - 1} of additional_config"):
        writer.empty(SHAPE, DTYPE)


def test_a_disk_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "file_system_type", lambda path: "ext4")
    with pytest.raises(ConfigurationError, match="lies on ext4, whose pages cannot be locked"):
        PinnedMemory(None, open_files(root))


def test_memory_of_its_own_is_aligned() -> None:
    tensor = PinnedMemory(1 << 20).empty(SHAPE, DTYPE)
    assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
    assert tensor.fill_(2).sum() == 2 * 4000
