"""Where a pager's host tensors come from: memory of this process, or the copy that a host's replicas share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from wisp_core.pager.host_files import HostFiles


class HostMemory(Protocol):
    """All host tensors of one engine."""

    @property
    def is_filled(self) -> bool:
        """Whether the tensors hold their final content already, since another process has loaded them."""
        ...

    @property
    def is_in_reach(self) -> bool:
        """Whether kernels can read the tensors where they are; final once all layers are there."""
        ...

    def creating(self) -> AbstractContextManager[Any]:
        """While open, vLLM creates the parameters of a layer in memory that it may load them into."""
        ...

    def publish(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take over the final content of a layer's parameters; returns the tensors to read from now on."""
        ...

    def attach(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of a layer that another process has loaded."""
        ...

    def finish(self) -> None:
        """Every layer is published."""
        ...


class PageableMemory:
    """For a CPU engine: ordinary memory, and with ``files`` the shared copy once a layer is loaded."""

    is_in_reach = True

    def __init__(self, files: HostFiles | None = None) -> None:
        self._files = files

    @property
    def is_filled(self) -> bool:
        """See `HostMemory`."""
        return self._files is not None and self._files.is_attached

    def creating(self) -> AbstractContextManager[Any]:
        """See `HostMemory`. What is never written takes no memory."""
        device: AbstractContextManager[Any] = torch.device("cpu")
        return device

    def publish(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `HostMemory`."""
        return dict(tensors) if self._files is None else self._files.publish(layer, tensors)

    def attach(self, layer: int) -> dict[str, torch.Tensor]:
        """See `HostMemory`."""
        assert self._files is not None, "only a shared copy is ever filled by others"
        return self._files.attach(layer)

    def finish(self) -> None:
        """See `HostMemory`."""
        if self._files is not None:
            self._files.finish()
