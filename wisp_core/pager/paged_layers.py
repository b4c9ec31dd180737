"""What both pagers know of their layers: announced in the order of the forward, filled in as they are loaded."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from wisp_core.errors import UnsupportedModelError
from wisp_core.pager.layer_slots import LayerSlots


class PagedLayer(Protocol):
    """One layer of a pager."""

    slots: LayerSlots

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, all its parameters."""
        ...


Layer = TypeVar("Layer", bound=PagedLayer)


class PagedLayers(Generic[Layer]):
    """Base of a pager that has ``cap`` slots in every layer."""

    cap: int
    num_experts: int

    def __init__(self) -> None:
        self._layers: list[Layer | None] = []

    def add_layer(self) -> int:
        """Announce one layer, in the order of the forward; returns its index."""
        self._layers.append(None)
        return len(self._layers) - 1

    @property
    def num_layers(self) -> int:
        """Paged layers."""
        return len(self._layers)

    @property
    def is_ready(self) -> bool:
        """Whether every announced layer is paged."""
        return bool(self._layers) and all(layer is not None for layer in self._layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes copied for one missed expert of one layer, all its parameters."""
        return self._layer(0).expert_bytes

    def experts_bytes_by_cap(self) -> tuple[int, ...]:
        """Index C: bytes of all layers' slots at cap C, whole pages; length E + 1."""
        layers = self._all_layers()
        return tuple(sum(layer.slots.bytes_at(cap) for layer in layers) for cap in range(self.num_experts + 1))

    def resident_bytes(self) -> int:
        """Bytes of the slots that really occupy memory, as the system counts them."""
        return sum(layer.slots.region.resident_bytes() for layer in self._loaded())

    def _refuse_twice(self, index: int) -> None:
        if self._layers[index] is not None:
            raise UnsupportedModelError(f"layer {index} is paged already; loading weights again is not supported")

    def _layer(self, index: int) -> Layer:
        layer = self._layers[index]
        if layer is None:
            raise RuntimeError(f"the experts of layer {index} are not loaded yet")
        return layer

    def _all_layers(self) -> list[Layer]:
        return [self._layer(index) for index in range(len(self._layers))]

    def _loaded(self) -> list[Layer]:
        return [layer for layer in self._layers if layer is not None]

    def _back(self, cap: int) -> None:
        """Give every layer the pages for ``cap``, or none. Raises MemoryError with nothing changed."""
        done: list[Layer] = []
        try:
            for layer in self._all_layers():
                layer.slots.back(self.cap, cap)
                done.append(layer)
        except MemoryError:
            for layer in done:
                layer.slots.release(cap, self.cap)
            raise
