"""One copy of the experts per host: who writes, who waits, who attaches."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from wisp_core.errors import ConfigurationError
from wisp_core.pager.host_files import HostFiles, checkpoint_facts, store_key

SIZES = [5000, 12_288, 7]
ALIGNMENT = 1 << 16


def write(files: HostFiles) -> list[torch.Tensor]:
    tensors = [files.next_tensor(size, ALIGNMENT) for size in SIZES]
    for seed, tensor in enumerate(tensors):
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return tensors


def test_the_second_process_finds_what_the_first_wrote(tmp_path: Path) -> None:
    first = HostFiles(tmp_path, "key")
    assert not first.is_attached
    written = write(first)
    first.finish()
    second = HostFiles(tmp_path, "key")
    assert second.is_attached
    for tensor in written:
        found = second.next_tensor(len(tensor), ALIGNMENT)
        assert found.data_ptr() != tensor.data_ptr()
        assert found.data_ptr() % ALIGNMENT == 0
        assert torch.equal(found, tensor)
        tensor[0] ^= 1
        assert torch.equal(found, tensor), "one copy"


def test_another_process_attaches_after_the_writer_is_gone(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from wisp_core.pager.host_files import HostFiles\n"
        "files = HostFiles(Path(sys.argv[1]), 'key'); files.next_tensor(100, 4096).fill_(7)\n"
        "if sys.argv[2] == 'finish': files.finish()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path), "die"], check=True, timeout=60)
    assert not HostFiles(tmp_path, "key").is_attached, "a writer that died has not finished"
    subprocess.run([sys.executable, "-c", program, str(tmp_path), "finish"], check=True, timeout=60)
    files = HostFiles(tmp_path, "key")
    assert files.is_attached
    assert files.next_tensor(100, 4096).tolist() == [7] * 100


def test_others_wait_for_the_writer(tmp_path: Path) -> None:
    writer = HostFiles(tmp_path, "key")
    write(writer)
    attached: list[bool] = []
    waiter = threading.Thread(target=lambda: attached.append(HostFiles(tmp_path, "key").is_attached))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    writer.finish()
    waiter.join(10)
    assert attached == [True]


def test_files_of_other_sizes_are_refused(tmp_path: Path) -> None:
    first = HostFiles(tmp_path, "key")
    write(first)
    first.finish()
    with pytest.raises(ConfigurationError, match=r"tensor-0 has 5000 bytes, not 6000: remove its directory"):
        HostFiles(tmp_path, "key").next_tensor(6000, ALIGNMENT)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"host_store_dir .*/dev/shm"):
        HostFiles(tmp_path / "file", "key")


def test_the_key_follows_what_the_bytes_depend_on(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    facts = {"model": str(tmp_path), "dtype": "bfloat16", "files": checkpoint_facts(str(tmp_path))}
    assert store_key(facts) == store_key(dict(reversed(facts.items())))
    assert store_key(facts) != store_key({**facts, "dtype": "float16"})
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert store_key(facts) != store_key({**facts, "files": checkpoint_facts(str(tmp_path))})
    assert checkpoint_facts("organisation/name") == []
