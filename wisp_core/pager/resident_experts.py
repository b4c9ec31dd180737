"""Stands where a pager would, for an engine whose experts all fit: nothing is looked up, copied or moved."""

from __future__ import annotations

import time

from wisp_core.contracts import PagerCounts
from wisp_core.errors import ConfigurationError
from wisp_core.pager.counters import ForwardCounter
from wisp_core.pager.host_memory import HostMemory, PageableMemory
from wisp_core.pager.interface import ExpertPager, ForwardObserver


class ResidentExperts:
    """The facts of a model's experts, and counts of its steps: what the engine asks of a pager once all is loaded.

    Lookups are not counted: vLLM's own layer routes, and nobody watches.
    """

    can_observe = False

    def __init__(self, pager: ExpertPager) -> None:
        """Take over the facts of ``pager``, which is to go."""
        self.num_layers = pager.num_layers
        self.num_experts = pager.num_experts
        self.top_k = pager.top_k
        self.cap = pager.num_experts
        self.expert_bytes = pager.expert_bytes
        self.observer: ForwardObserver | None = None
        self.host_memory: HostMemory = PageableMemory()
        self._experts_bytes = pager.experts_bytes_by_cap()[pager.num_experts]
        self._started: tuple[int, bool, float] | None = None
        self.reset_statistics()

    @property
    def is_ready(self) -> bool:
        """Always: the layers are vLLM's own."""
        return True

    def begin_step(self, num_tokens: int, is_prefill: bool) -> None:
        """A step starts; one of 0 tokens (profiling, capture) is not counted."""
        self._started = (num_tokens, is_prefill, time.perf_counter()) if num_tokens else None

    def end_step(self) -> None:
        """The step's launches are made."""
        if self._started is None:
            return
        num_tokens, is_prefill, started_s = self._started
        counter = self._prefill if is_prefill else self._decode
        counter.add(num_tokens, time.perf_counter() - started_s, 0.0)
        self._started = None

    def set_cap(self, cap: int) -> None:
        """Nothing to do at E. Raises ConfigurationError for any other cap."""
        if cap != self.num_experts:
            raise ConfigurationError(f"cap {cap}: all {self.num_experts} experts are resident and stay so")

    def experts_bytes_by_cap(self) -> tuple[int, ...]:
        """All experts' bytes at every cap: none of them can be given up."""
        return (self._experts_bytes,) * (self.num_experts + 1)

    def resident_bytes(self) -> int:
        """All experts' bytes."""
        return self._experts_bytes

    def check_integrity(self) -> None:
        """Nothing can be wrong."""

    @property
    def counts_decode(self) -> PagerCounts:
        """Steps, tokens and time; no lookups."""
        return self._decode.counts(self.expert_bytes)

    @property
    def counts_prefill(self) -> PagerCounts:
        """The same of prefills."""
        return self._prefill.counts(self.expert_bytes)

    def decode_misses_by_cap(self) -> tuple[float, ...]:
        """Empty: not measured."""
        return ()

    def prefill_misses_by_cap(self) -> tuple[float, ...]:
        """Empty: not measured."""
        return ()

    def decode_union_by_batch(self) -> tuple[float, ...]:
        """Empty: not measured."""
        return ()

    def reset_statistics(self) -> None:
        """Forget counts."""
        self._decode, self._prefill = ForwardCounter(), ForwardCounter()
