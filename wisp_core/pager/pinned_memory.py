"""Host memory that a GPU reads in place: mapped at aligned addresses and page-locked at its exact size.

torch's pinned allocator rounds sizes up to powers of two, and rows that start off 128 bytes cross the link 4 % slower;
so experts get mappings of their own, on huge pages where the system grants them. Replicas on one host can share them
instead (`wisp_core.pager.host_files`).

Where CUDA refuses to lock them, experts stay in ordinary memory, out of the device's reach, and the host copies what a
step needs (`wisp_core.pager.device.unlocked_runner`): the same answers, much slower.
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

from wisp_core.errors import ConfigurationError
from wisp_core.memory.populate import populate
from wisp_core.pager.host_files import ALIGNMENT_BYTES, HostFiles, file_system_type

logger = logging.getLogger(f"vllm.{__name__}")  # below "vllm", whose handlers and level a server configures

_SPARE_BYTES = 1 << 30
"""What the preflight leaves to the rest of the machine."""

_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}


class PinnedMemory:
    """Makes page-locked host tensors, and refuses before the machine runs out of memory."""

    def __init__(
        self, budget_bytes: int | None = None, files: HostFiles | None = None, *, is_locking: bool = True
    ) -> None:
        """Use at most ``budget_bytes``; None: what the system reports as available at each allocation.

        Without ``is_locking`` nothing is locked, as where CUDA refuses to. With ``files``, tensors are those that the
        host's replicas share; what another process has loaded takes no further memory and is not counted. Raises
        ConfigurationError when those lie on a disk.
        """
        if files is not None and file_system_type(files.directory) not in _MEMORY_FILE_SYSTEMS:
            raise ConfigurationError(
                f"additional_config.wisp.host_store_dir: {files.directory} lies on "
                f"{file_system_type(files.directory)}, whose pages cannot be locked for a GPU; name a memory file "
                "system such as /dev/shm"
            )
        self._budget_bytes = budget_bytes
        self._files = files
        self.is_in_reach = is_locking
        self._locked: list[torch.Tensor] = []
        self.used_bytes = 0
        # Not at exit: the driver may be gone by then, and the process's end unlocks everything.
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A page-locked tensor, valid as long as this object lives.

        Raises ConfigurationError, with the numbers, when it does not fit. `is_in_reach` says whether it is locked.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        self._check(num_bytes)
        return self._lock(self._pages(num_bytes)).view(dtype).view(shape)

    @property
    def is_filled(self) -> bool:
        """See `wisp_core.pager.host_memory.HostMemory`."""
        return self._files is not None and self._files.is_attached

    def creating(self) -> AbstractContextManager[Any]:
        """See `wisp_core.pager.host_memory.HostMemory`. What is never written takes no memory."""
        context: AbstractContextManager[Any] = torch.device("cpu") if self.is_filled else EmptyInPinnedMemory(self)
        return context

    def publish(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `wisp_core.pager.host_memory.HostMemory`."""
        return dict(tensors) if self._files is None else self._files.publish(layer, tensors)

    def attach(self, layer: int) -> dict[str, torch.Tensor]:
        """See `wisp_core.pager.host_memory.HostMemory`."""
        assert self._files is not None, "only a shared copy is ever filled by others"
        tensors = self._files.attach(layer)
        for tensor in tensors.values():
            self._lock(tensor)
        return tensors

    def finish(self) -> None:
        """See `wisp_core.pager.host_memory.HostMemory`."""
        if self._files is not None:
            self._files.finish()

    def _lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lock it; once CUDA has refused, that and all later ones stay as they are."""
        if self.is_in_reach:
            try:
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)))
            except RuntimeError as error:
                self._warn(tensor.nbytes, error)
                self.is_in_reach = False
            else:
                self._locked.append(tensor)
        self.used_bytes += tensor.nbytes
        return tensor

    def _warn(self, num_bytes: int, error: RuntimeError) -> None:
        logger.warning(
            "WiSP: CUDA cannot page-lock %d bytes of host memory after %d (%s), so the GPU cannot read experts in "
            "place: the host copies what each layer needs, without CUDA graphs. Answers are the same, decoding is many "
            "times slower. To mend it, raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit "
            "memlock=-1; under WSL, memory= in .wslconfig) and start again",
            num_bytes,
            self.used_bytes,
            error,
        )

    def _pages(self, num_bytes: int) -> torch.Tensor:
        if self._files is not None:
            return self._files.allocate(num_bytes)
        mapping = mmap.mmap(-1, num_bytes + ALIGNMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_DONTFORK)  # a child process would copy pages, which locked ones cannot be
        pages = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -pages.data_ptr() % ALIGNMENT_BYTES  # what lies before and after is never touched, so never backed
        tensor = pages[start : start + num_bytes]
        try:
            populate(tensor.data_ptr(), num_bytes)
        except OSError as error:
            raise ConfigurationError(
                f"host memory: {num_bytes} bytes refused after {self.used_bytes} ({error.strerror}); all experts stay "
                "in host memory: use a machine or a container limit with more, or a smaller model"
            ) from error
        return tensor

    def _check(self, num_bytes: int) -> None:
        if self._budget_bytes is not None:
            free_bytes, source = self._budget_bytes - self.used_bytes, "of additional_config.wisp.host_memory_bytes"
        else:
            free_bytes, source = psutil.virtual_memory().available - _SPARE_BYTES, "that the system reports"
        if num_bytes > free_bytes:
            raise ConfigurationError(
                f"host memory: the next expert tensor takes {num_bytes} bytes, but {free_bytes} {source} are left "
                f"after {self.used_bytes}; all experts stay in host memory. Use a machine with more, a smaller "
                "model, or set additional_config.wisp.host_memory_bytes if more can be locked than the system reports"
            )


class EmptyInPinnedMemory(TorchFunctionMode):  # type: ignore[misc]
    """While active, every ``torch.empty`` and ``torch.zeros`` is page-locked host memory, whatever its device."""

    def __init__(self, memory: PinnedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stand in for the two factories; everything else runs as it is."""
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.zeros):
            return func(*args, **kwargs)
        size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        tensor = self._memory.empty(tuple(size), kwargs.get("dtype") or torch.get_default_dtype())
        return tensor.zero_() if func is torch.zeros else tensor


def _unlock(tensors: list[torch.Tensor]) -> None:
    if tensors:
        torch.cuda.synchronize()
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    tensors.clear()
