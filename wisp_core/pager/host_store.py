"""Every expert of one layer in host memory: the only full copy of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from wisp_core.errors import UnsupportedModelError

_PREFIXES = ("w13_", "w2_")


def paged_parameters(
    layer_name: str, parameters: Iterable[tuple[str, torch.nn.Parameter]], num_experts: int
) -> dict[str, torch.nn.Parameter]:
    """The parameters of a routed-experts layer that are paged: all named ``w13_*`` or ``w2_*``.

    Raises UnsupportedModelError when there are none, or one of them is not contiguous with a leading dimension of
    ``num_experts``, since then one expert is not one run of bytes.
    """
    found = {name: parameter for name, parameter in parameters if name.startswith(_PREFIXES)}
    for name, parameter in found.items():
        if parameter.dim() == 0 or parameter.shape[0] != num_experts or not parameter.data.is_contiguous():
            raise UnsupportedModelError(
                f"{layer_name}.{name} has shape {tuple(parameter.shape)}, strides {parameter.stride()}; paging needs "
                f"contiguous parameters with {num_experts} experts in front. Remove 'wisp' from --additional-config."
            )
    if not found:
        raise UnsupportedModelError(
            f"{layer_name} has no parameter named w13_* or w2_*. Remove 'wisp' from --additional-config."
        )
    return found


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """Shape of one paged parameter, experts in front."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return math.prod(self.shape[1:]) * int(self.dtype.itemsize)


class HostStore:
    """Host tensors [E, ...] by parameter name. It keeps the given storage and copies nothing."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over ``tensors``, contiguous and on the CPU."""
        self._tensors = dict(tensors)
        self._rows = {name: list(tensor.unbind(0)) for name, tensor in self._tensors.items()}
        self.num_experts = len(next(iter(self._rows.values())))

    @property
    def shapes(self) -> dict[str, ParameterShape]:
        """Shape of each parameter."""
        return {name: ParameterShape(tuple(t.shape), t.dtype) for name, t in self._tensors.items()}

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, all parameters."""
        return sum(shape.expert_bytes for shape in self.shapes.values())

    def rows(self, name: str) -> list[torch.Tensor]:
        """One view per expert of parameter ``name``."""
        return self._rows[name]

    def tensor(self, name: str) -> torch.Tensor:
        """All experts of parameter ``name``, [E, ...]."""
        return self._tensors[name]

    def address(self, name: str) -> int:
        """Address of the first expert of parameter ``name``."""
        return int(self._tensors[name].data_ptr())
