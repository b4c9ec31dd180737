"""One copy of the experts per host: who writes, who waits, who attaches, what is refused and what is cleaned up."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from wisp_core.errors import ConfigurationError
from wisp_core.pager import host_files
from wisp_core.pager.host_files import ALIGNMENT_BYTES, HostFiles, checkpoint_facts, file_system_type
from wisp_core.pager.host_memory import PageableMemory

SUBJECT = {"model": "m", "dtype": "bfloat16"}


def open_files(root: Path, version: object = 1, **subject: Any) -> HostFiles:
    return HostFiles(root, subject={**SUBJECT, **subject}, version={"files": version})


def layer(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w13_weight": torch.randn(4, 6, 10, generator=generator).to(torch.bfloat16),
        "w2_weight": torch.randn(4, 10, 3, generator=generator),
    }


def write(root: Path, version: object = 1) -> list[dict[str, torch.Tensor]]:
    files = open_files(root, version)
    assert not files.is_attached
    published = [files.publish(index, layer(index)) for index in range(2)]
    files.finish()
    return published


def test_the_second_process_finds_what_the_first_wrote(tmp_path: Path) -> None:
    published = write(tmp_path)
    second = open_files(tmp_path)
    assert second.is_attached
    for index, of_layer in enumerate(published):
        found = second.attach(index)
        assert found.keys() == of_layer.keys()
        for name, tensor in of_layer.items():
            assert found[name].data_ptr() != tensor.data_ptr()
            assert found[name].data_ptr() % ALIGNMENT_BYTES == 0
            assert torch.equal(found[name], layer(index)[name])
            tensor.view(-1)[0] += 1
            assert torch.equal(found[name], tensor), "one copy"


def test_what_was_allocated_in_the_copy_is_published_in_place(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    tensor = files.allocate(24).view(torch.float32).view(2, 3).fill_(7.0)
    assert files.publish(0, {"w2_weight": tensor})["w2_weight"] is tensor
    files.finish()
    assert torch.equal(open_files(tmp_path).attach(0)["w2_weight"], torch.full((2, 3), 7.0))
    assert len(list(files.directory.glob("tensor-*"))) == 1


PROGRAM = """
import sys, torch
from pathlib import Path
from wisp_core.pager.host_files import HostFiles
files = HostFiles(Path(sys.argv[1]), subject={"model": "m", "dtype": "bfloat16"}, version={"files": 1})
print("attached" if files.is_attached else "writes")
if not files.is_attached:
    files.publish(0, {"w": torch.full((100,), 7.0)})
    if sys.argv[2] == "finish":
        files.finish()
"""


def run(root: Path, how: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(root), how]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout.strip()


def test_a_copy_outlives_its_writer_and_a_half_written_one_is_written_anew(tmp_path: Path) -> None:
    assert run(tmp_path, "die") == "writes"
    (directory,) = tmp_path.iterdir()
    (directory / "tensor-9").write_bytes(b"left over")
    assert run(tmp_path, "finish") == "writes", "a writer that died has not finished"
    assert not (directory / "tensor-9").exists()
    assert run(tmp_path, "finish") == "attached"
    assert open_files(tmp_path).attach(0)["w"].tolist() == [7.0] * 100


def test_others_wait_for_the_writer(tmp_path: Path) -> None:
    writer = open_files(tmp_path)
    writer.publish(0, layer(0))
    attached: list[bool] = []
    waiters = [threading.Thread(target=lambda: attached.append(open_files(tmp_path).is_attached)) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    waiters[0].join(0.3)
    assert all(waiter.is_alive() for waiter in waiters)
    writer.finish()
    for waiter in waiters:
        waiter.join(10)
    assert attached == [True] * 3


def test_one_of_those_who_wait_takes_over_from_a_writer_that_dies(tmp_path: Path) -> None:
    writer: list[HostFiles] = [open_files(tmp_path)]
    roles: list[bool] = []

    def wait() -> None:
        files = open_files(tmp_path)
        roles.append(files.is_attached)
        if not files.is_attached:
            files.publish(0, layer(0))
            files.finish()

    waiters = [threading.Thread(target=wait) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    waiters[0].join(0.2)
    writer.clear()
    for waiter in waiters:
        waiter.join(20)
    assert sorted(roles) == [False, True, True, True]


def test_an_older_version_is_removed_unless_somebody_uses_it(tmp_path: Path) -> None:
    write(tmp_path, version=1)
    (old,) = tmp_path.iterdir()
    user = open_files(tmp_path, version=1)
    write(tmp_path, version=2)
    assert (old / "ready").exists(), "in use"
    del user
    write(tmp_path, version=3)
    assert not old.exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_copy_that_is_removed_between_two_locks_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    (copy,) = tmp_path.iterdir()
    flock = fcntl.flock

    def removed_when_shared(lock: int, operation: int) -> None:
        flock(lock, operation)
        if operation == fcntl.LOCK_SH:  # no user held it for a moment
            monkeypatch.undo()
            shutil.rmtree(copy)

    monkeypatch.setattr(host_files.fcntl, "flock", removed_when_shared)
    files = open_files(tmp_path)
    assert not files.is_attached
    assert files.directory == copy
    assert (copy / "lock").exists()


def test_a_copy_that_is_removed_as_it_is_finished_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files(tmp_path)
    published = files.publish(0, layer(0))
    flock = fcntl.flock

    def removed_when_shared(lock: int, operation: int) -> None:
        shutil.rmtree(files.directory)
        flock(lock, operation)

    told: list[Any] = []
    monkeypatch.setattr(host_files.fcntl, "flock", removed_when_shared)
    monkeypatch.setattr(host_files.logger, "warning", lambda *message: told.append(message))
    files.finish()
    assert len(told) == 1
    assert told[0][1] == files.directory
    assert torch.equal(published["w2_weight"], layer(0)["w2_weight"]), "it serves on"


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    open_files(tmp_path, model="another")
    assert open_files(tmp_path).is_attached


def test_damaged_copies_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    files = open_files(tmp_path)
    with pytest.raises(ConfigurationError, match=r"knows no layer 7: remove that directory"):
        files.attach(7)
    os.truncate(files.directory / "tensor-0", 10)
    with pytest.raises(ConfigurationError, match=r"tensor-0 has 10 bytes, not 480: remove its directory"):
        files.attach(0)
    (files.directory / "tensor-0").unlink()
    with pytest.raises(ConfigurationError, match=r"tensor-0: No such file.*: remove its directory"):
        files.attach(0)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"host_store_dir .*/dev/shm"):
        open_files(tmp_path / "file")


@pytest.mark.timeout(10)
def test_a_directory_below_which_nothing_can_be_made_is_refused_and_not_tried_for_ever() -> None:
    with pytest.raises(ConfigurationError, match=r"host_store_dir /proc/wisp"):
        open_files(Path("/proc/wisp"))


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (directory,) = tmp_path.iterdir()
    directory.chmod(0o770)
    with pytest.raises(ConfigurationError, match=r"not a directory of this user alone .*mode 770"):
        open_files(tmp_path)
    directory.rename(tmp_path / "real")
    directory.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="not a directory of this user alone"):
        open_files(tmp_path)


def test_a_full_file_system_is_refused_with_its_numbers(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    with pytest.raises(ConfigurationError, match=r"bytes refused \(.*are free of \d+.*--shm-size"):
        files.allocate(1 << 60)


def test_the_version_follows_the_checkpoint(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    first = checkpoint_facts(str(model))
    (model / "model.safetensors").write_bytes(b"22")
    assert checkpoint_facts(str(model)) != first
    assert checkpoint_facts("organisation/name") == []


def test_the_type_of_a_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert file_system_type(Path("/proc")) == "proc"
    assert file_system_type(Path("/dev/shm")) == "tmpfs"
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /a rw shared:2 - tmpfs none rw\n")
    monkeypatch.setattr(host_files, "_MOUNTS", mounts)
    assert file_system_type(Path("/a/b")) == "tmpfs"
    assert file_system_type(Path("/ab")) == "ext4"


def test_memory_without_files_passes_tensors_through(tmp_path: Path) -> None:
    memory, tensors = PageableMemory(), layer(0)
    assert memory.publish(0, tensors)["w2_weight"] is tensors["w2_weight"]
    assert not memory.is_filled
    memory.finish()
    shared = PageableMemory(open_files(tmp_path))
    shared.publish(0, tensors)
    shared.finish()
    attached = PageableMemory(open_files(tmp_path))
    assert attached.is_filled
    assert torch.equal(attached.attach(0)["w13_weight"], tensors["w13_weight"])
