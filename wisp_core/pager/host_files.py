"""One copy of a model's experts per host: files of a memory file system that all replicas map.

The directory of a model holds ``lock``, one file per tensor, and ``ready`` once all are written. Whoever holds the lock
and finds no ``ready`` writes; others wait for the lock and attach. The files outlive the processes, so a replica that
restarts finds its experts in memory. Removing the directory gives the memory back once no process maps it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wisp_core.errors import ConfigurationError

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; Python's mmap names neither
_FAILED = ctypes.c_void_p(-1).value


def store_key(facts: Mapping[str, Any]) -> str:
    """Short name of everything that the experts' bytes depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def checkpoint_facts(model: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a local checkpoint's files; empty for a name without a directory."""
    directory = Path(model)
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


class HostFiles:
    """This process's view of one model's files. Tensors are asked for in the same order by every process."""

    def __init__(self, root: Path, key: str) -> None:
        """Use the directory ``root/wisp-experts-<key>``; waits while another process writes it.

        Raises ConfigurationError when it cannot be made.
        """
        self.directory = root / f"wisp-experts-{key}"
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"additional_config.wisp.host_store_dir {root}: {error.strerror}; name a writable memory file system "
                "such as /dev/shm"
            ) from error
        self._unlock = weakref.finalize(self, os.close, lock)  # also when loading fails
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.is_attached = (self.directory / "ready").exists()
        self._num_tensors = 0
        if self.is_attached:
            self._unlock()

    def next_tensor(self, num_bytes: int, alignment_bytes: int) -> torch.Tensor:
        """The next tensor's bytes as uint8 [num_bytes], at an address that is a multiple of ``alignment_bytes``.

        Raises ConfigurationError when the file system is full or holds a file of another size.
        """
        path = self.directory / f"tensor-{self._num_tensors}"
        self._num_tensors += 1
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if self.is_attached and os.fstat(fd).st_size != num_bytes:
                raise ConfigurationError(
                    f"{path} has {os.fstat(fd).st_size} bytes, not {num_bytes}: remove its directory"
                )
            if not self.is_attached:
                os.ftruncate(fd, num_bytes)
                os.posix_fallocate(fd, 0, num_bytes)  # a page that is missing later would kill the process
            return _map_aligned(fd, num_bytes, alignment_bytes)
        except OSError as error:
            free_bytes = os.statvfs(self.directory).f_bavail * os.statvfs(self.directory).f_frsize
            raise ConfigurationError(
                f"{path}: {num_bytes} bytes refused ({error.strerror}), {free_bytes} are free: enlarge that file "
                "system or leave additional_config.wisp.host_store_dir out"
            ) from error
        finally:
            os.close(fd)

    def finish(self) -> None:
        """All tensors hold their final content: let others attach."""
        if not self.is_attached:
            (self.directory / "ready").touch(mode=0o600)
            self._unlock()


def _map_aligned(fd: int, num_bytes: int, alignment_bytes: int) -> torch.Tensor:
    """A shared mapping of a whole file, for the life of the process. Python's mmap cannot choose the address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

    def map_pages(address: int | None, size: int, protection: int, flags: int, file: int) -> int:
        mapped = libc.mmap(address, size, protection, flags, file, 0)
        if mapped is None or mapped == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(mapped)

    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = map_pages(None, num_bytes + alignment_bytes, 0, anonymous, -1)
    start = reserved + -reserved % alignment_bytes
    map_pages(start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(start), dtype=torch.uint8)
