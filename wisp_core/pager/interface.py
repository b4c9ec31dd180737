"""What the engine asks of a pager, whether the host decides (CPU) or the device does (GPU)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import PagerCounts
from wisp_core.pager.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class ForwardInfo:
    """What kind of forward runs: a *prefill* computes more than one token of some request."""

    is_prefill: bool
    num_tokens: int  # rows that are real tokens; later rows are padding


class ForwardObserver(Protocol):
    """Sees the routing of every counted forward, layer by layer, before its experts are copied."""

    def observe(
        self,
        layer_index: int,
        topk_ids: npt.NDArray[np.integer],  # [rows, top_k]
        was_resident: npt.NDArray[np.bool_],  # [E]
        is_prefill: bool,
    ) -> None:
        """Called on the model's thread: keep it short, and copy ``topk_ids`` if it is kept."""
        ...


class ExpertPager(Protocol):
    """All paged layers of one engine process: one cap, one set of counters."""

    num_experts: int
    top_k: int
    cap: int

    @property
    def host_memory(self) -> HostMemory:
        """Where the host tensors come from."""
        ...

    def add_layer(self) -> int:
        """Announce one layer, in the order of the forward; returns its index."""
        ...

    def page_layer(self, index: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Take over the host tensors [E, ...] of layer ``index``; returns the slot tensors to use instead."""
        ...

    @property
    def num_layers(self) -> int:
        """Paged layers."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether every announced layer is paged."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Bytes copied for one missed expert of one layer, all its parameters."""
        ...

    def set_cap(self, cap: int) -> None:
        """Change the slots per layer, between forwards; the most recent experts stay."""
        ...

    def experts_bytes_by_cap(self) -> tuple[int, ...]:
        """Index C: bytes of all layers' slots at cap C, whole pages; length E + 1."""
        ...

    def resident_bytes(self) -> int:
        """Bytes of the slots that really occupy memory."""
        ...

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every table is sound and the pages held are exactly those of the cap."""
        ...

    @property
    def counted_at_s(self) -> float | None:
        """When the counts were as they are told, on the monotonic clock; None: now."""
        ...

    @property
    def counts_decode(self) -> PagerCounts:
        """Forwards in which every request computed one token."""
        ...

    @property
    def counts_prefill(self) -> PagerCounts:
        """Forwards in which some request computed more than one token."""
        ...

    def decode_misses_by_cap(self) -> tuple[float, ...]:
        """Index C: expected copies per decode step over all layers, recent steps weighing more; empty before any."""
        ...

    def prefill_misses_by_cap(self) -> tuple[float, ...]:
        """Index C: the same per prefill step."""
        ...

    def decode_union_by_batch(self) -> tuple[float, ...]:
        """Index b: distinct experts of one layer that b decode rows need together; empty where it is not seen."""
        ...

    def reset_statistics(self) -> None:
        """Forget counts and curves, as after profiling; residency and its order stay."""
        ...
