"""One copy of a model's experts per host: files of a memory file system that all replicas map.

The directory of a copy holds ``lock``, one file per tensor, and ``ready`` once all are written: a manifest of which
tensor is where. One process writes, under an exclusive lock; whoever uses the copy holds a shared one for life. The
files outlive the processes, so a replica that restarts finds its experts in memory.

* A copy without ``ready`` is one whose writer died: the next process starts it anew.
* A copy of the same model in another version (checkpoint, vLLM, layout) is removed by the next writer if it is unused.

Removing a directory by hand gives its memory back once no process maps it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import stat
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from wisp_core.errors import ConfigurationError
from wisp_core.memory.populate import populate

logger = logging.getLogger(f"vllm.{__name__}")  # below "vllm", whose handlers and level a server configures

ALIGNMENT_BYTES = 4 << 20
"""Where a tensor starts: huge pages of the host and a page of the device."""

LAYOUT_VERSION = 2
"""Of the directory's content; part of every copy's version."""

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; Python's mmap names neither
_FAILED = ctypes.c_void_p(-1).value
_PREFIX = "wisp-experts"
_MOUNTS = Path("/proc/self/mountinfo")
_LOCK, _READY = "lock", "ready"


def checkpoint_facts(model: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a local checkpoint's files; empty for a name without a directory."""
    directory = Path(model)
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def file_system_type(path: Path) -> str:
    """Type of the file system that an existing ``path`` lies on, such as tmpfs; "unknown" if nobody says."""
    wanted, best = path.resolve(), ("", "unknown")
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4]
        if wanted.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, after.split()[0])
    return best[1]


class HostFiles:
    """This process's hold on one copy: its writer, or one that is attached to what another process wrote."""

    def __init__(self, root: Path, *, subject: Mapping[str, Any], version: Mapping[str, Any]) -> None:
        """Use a directory below ``root``; waits while another process writes it.

        Args:
            root: a directory of a memory file system, such as /dev/shm.
            subject: whose experts these are, and in what form; JSON.
            version: everything else that their bytes depend on; JSON.

        Raises:
            ConfigurationError: it cannot be made, or is not this user's alone.
        """
        self._root, self._subject = root, _digest(subject)
        self.directory = root / f"{_PREFIX}-{self._subject}-{_digest({**version, 'layout': LAYOUT_VERSION})}"
        self._lock = _own_lock(self.directory)
        # Also when loading fails: the lock goes with the object.
        weakref.finalize(self, os.close, self._lock)
        self.is_attached = (self.directory / _READY).exists()
        self._manifest: dict[str, dict[str, Any]] = {}  # "layer/parameter" -> file, shape, dtype
        self._file_of: dict[int, str] = {}  # address -> file
        if self.is_attached:
            self._manifest = json.loads((self.directory / _READY).read_text())
        else:
            self._clear()
            self._remove_stale()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """The writer's next tensor: uint8 [num_bytes] at an address that is a multiple of `ALIGNMENT_BYTES`.

        Raises ConfigurationError when the file system is full.
        """
        name = f"tensor-{len(self._file_of)}"
        fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if num_bytes > self._free_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(fd, num_bytes)
            tensor = _map_aligned(fd, num_bytes)
            populate(tensor.data_ptr(), num_bytes)  # a page that is missing later would kill the process
        except OSError as error:
            raise self._is_full(name, num_bytes, error) from error
        finally:
            os.close(fd)
        self._file_of[tensor.data_ptr()] = name
        return tensor

    def publish(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put the final content of a layer's parameters on record; returns the copy's tensors.

        Those that do not lie in the copy yet are copied into it.
        """
        published = {}
        for parameter, tensor in tensors.items():
            if tensor.data_ptr() not in self._file_of:
                tensor = self.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._manifest[f"{layer}/{parameter}"] = {
                "file": self._file_of[tensor.data_ptr()],
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            published[parameter] = tensor
        return published

    def finish(self) -> None:
        """Every layer is published: let others attach."""
        if self.is_attached:
            return
        part = self.directory / f"{_READY}.part"
        part.write_text(json.dumps(self._manifest))
        part.replace(self.directory / _READY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        if not _is_in_place(self._lock, self.directory):
            logger.warning(
                "WiSP: %s was removed by a process that loads another version: its memory stays taken while this "
                "process lives, and the next one of this version makes a copy of its own",
                self.directory,
            )

    def attach(self, layer: int) -> dict[str, torch.Tensor]:
        """The parameters of one layer, as another process has published them.

        Raises ConfigurationError when a file is missing or has another size.
        """
        entries = {
            parameter: entry
            for (owner, _, parameter), entry in ((name.partition("/"), entry) for name, entry in self._manifest.items())
            if owner == str(layer)
        }
        if not entries:
            raise ConfigurationError(f"{self.directory} knows no layer {layer}: remove that directory")
        return {parameter: self._attach(entry) for parameter, entry in entries.items()}

    def _attach(self, entry: dict[str, Any]) -> torch.Tensor:
        path, shape, dtype = self.directory / entry["file"], entry["shape"], getattr(torch, entry["dtype"])
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}: remove its directory") from error
        try:
            if os.fstat(fd).st_size != num_bytes:
                raise ConfigurationError(
                    f"{path} has {os.fstat(fd).st_size} bytes, not {num_bytes}: remove its directory"
                )
            return _map_aligned(fd, num_bytes).view(dtype).view(shape)
        finally:
            os.close(fd)

    def _is_full(self, name: str, num_bytes: int, error: OSError) -> ConfigurationError:
        size = os.statvfs(self.directory)
        return ConfigurationError(
            f"{self.directory / name}: {num_bytes} bytes refused ({error.strerror}), {self._free_bytes()} are free of "
            f"{size.f_blocks * size.f_frsize}: enlarge that file system (mount -o remount,size=..., docker run "
            "--shm-size=..., or a Kubernetes emptyDir with medium: Memory), or leave "
            "additional_config.wisp.host_store_dir out"
        )

    def _free_bytes(self) -> int:
        free = os.statvfs(self.directory)
        return free.f_bavail * free.f_frsize

    def _clear(self) -> None:
        """Remove what a writer that died has left."""
        for path in self.directory.iterdir():
            if path.name != _LOCK:
                path.unlink()

    def _remove_stale(self) -> None:
        """Remove other versions of this model's experts that nobody uses."""
        for directory in self._root.glob(f"{_PREFIX}-{self._subject}-*"):
            if directory == self.directory:
                continue
            try:
                lock = _open_lock(directory)
            except (OSError, ConfigurationError):
                continue  # gone, or not ours
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # in use
            else:
                logger.info("WiSP: removing %s, an older copy of these experts that no process uses", directory)
                shutil.rmtree(directory)
            finally:
                os.close(lock)


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _own_lock(directory: Path) -> int:
    """A descriptor of ``directory``'s lock: shared if the copy is ready, else exclusive."""
    while True:
        try:
            lock = _make_lock(directory)
        except OSError as error:
            raise ConfigurationError(
                f"additional_config.wisp.host_store_dir {directory.parent}: {error.strerror}; name a writable memory "
                "file system such as /dev/shm"
            ) from error
        if lock is not None and _settle(lock, directory):
            return lock
        if lock is not None:
            os.close(lock)


def _make_lock(directory: Path) -> int | None:
    """A descriptor of the lock of ``directory``, both made if missing; None when somebody removed it meanwhile."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        return _open_lock(directory)
    except FileNotFoundError:
        return None  # a process that cleans up was faster


def _settle(lock: int, directory: Path) -> bool:
    """Lock as writer or as user; False when it has to be tried again from the start."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Users hold it, or the writer does, which takes as long as reading the checkpoint.
        if not (directory / _READY).exists():
            logger.info("WiSP: waiting for the process that writes %s", directory)
        fcntl.flock(lock, fcntl.LOCK_SH)
    if not _is_in_place(lock, directory):
        return False
    if (directory / _READY).exists():
        fcntl.flock(lock, fcntl.LOCK_SH)
        # From exclusive to shared is two moves, and a process that cleans up may have come between.
        return _is_in_place(lock, directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_in_place(lock, directory) and not (directory / _READY).exists()


def _is_in_place(lock: int, directory: Path) -> bool:
    """Whether the locked file is still the directory's: a process that cleans up may have removed both."""
    try:
        there = os.stat(directory / _LOCK)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (os.fstat(lock).st_dev, os.fstat(lock).st_ino)


def _open_lock(directory: Path) -> int:
    """Raises ConfigurationError when others can write to ``directory``: whoever can decides what is computed."""
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ConfigurationError(
            f"{directory} is not a directory of this user alone (owner {facts.st_uid}, mode {facts.st_mode & 0o777:o}):"
            " remove it, or name another additional_config.wisp.host_store_dir"
        )
    return os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _map_aligned(fd: int, num_bytes: int) -> torch.Tensor:
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
    reserved = map_pages(None, num_bytes + ALIGNMENT_BYTES, 0, anonymous, -1)
    start = reserved + -reserved % ALIGNMENT_BYTES
    map_pages(start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(start), dtype=torch.uint8)
