"""Stands where a pager would, for an engine whose experts all fit: nothing is looked up, copied or moved."""

from __future__ import annotations

import time
from typing import Protocol

from wisp_core.contracts import PagerCounts
from wisp_core.errors import ConfigurationError
from wisp_core.pager.counters import ForwardCounter
from wisp_core.pager.interface import ExpertPager


class Clock(Protocol):
    """Times steps by kind; on a GPU `wisp_core.pager.device.step_clock.StepClock`."""

    def start(self, *, is_prefill: bool) -> None:
        """A step starts."""
        ...

    def stop(self) -> None:
        """Its calls have returned."""
        ...

    def seconds(self, *, is_prefill: bool) -> float:
        """Of all steps of one kind that are over."""
        ...

    def reset(self) -> None:
        """Forget all steps."""
        ...


class HostClock:
    """A `Clock` of steps that are over when their calls return."""

    def __init__(self) -> None:
        self.reset()

    def start(self, *, is_prefill: bool) -> None:
        """See `Clock`."""
        self._is_prefill, self._started_s = is_prefill, time.perf_counter()

    def stop(self) -> None:
        """See `Clock`."""
        self._seconds[self._is_prefill] += time.perf_counter() - self._started_s

    def seconds(self, *, is_prefill: bool) -> float:
        """See `Clock`."""
        return self._seconds[is_prefill]

    def reset(self) -> None:
        """See `Clock`."""
        self._seconds = {False: 0.0, True: 0.0}


class ResidentExperts:
    """The facts of a model's experts, and counts of its steps: what the engine asks of a pager once all is loaded.

    Lookups are not counted: vLLM's own layer routes, and nobody watches.
    """

    def __init__(self, pager: ExpertPager, clock: Clock) -> None:
        """Take over the facts of ``pager``, which is to go."""
        self.num_layers = pager.num_layers
        self.num_experts = pager.num_experts
        self.top_k = pager.top_k
        self.cap = pager.num_experts
        self.expert_bytes = pager.expert_bytes
        self._experts_bytes = pager.experts_bytes_by_cap()[pager.num_experts]
        self._clock = clock
        self._started: tuple[int, bool] | None = None
        self.reset_statistics()

    def begin_step(self, num_tokens: int, is_prefill: bool) -> None:
        """A step starts; one of 0 tokens (profiling, capture) is not counted."""
        self._started = (num_tokens, is_prefill) if num_tokens else None
        if self._started:
            self._clock.start(is_prefill=is_prefill)

    def end_step(self) -> None:
        """The step's launches are made."""
        if self._started is None:
            return
        self._clock.stop()
        num_tokens, is_prefill = self._started
        counter = self._prefill if is_prefill else self._decode
        counter.add(num_tokens, 0.0, 0.0)
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
    def counted_at_s(self) -> None:
        """None: now."""

    @property
    def counts_decode(self) -> PagerCounts:
        """Steps, tokens and time; no lookups."""
        return self._counts(self._decode, is_prefill=False)

    @property
    def counts_prefill(self) -> PagerCounts:
        """The same of prefills."""
        return self._counts(self._prefill, is_prefill=True)

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
        self._clock.reset()

    def _counts(self, counter: ForwardCounter, *, is_prefill: bool) -> PagerCounts:
        seconds = self._clock.seconds(is_prefill=is_prefill)
        return counter.counts(self.expert_bytes).model_copy(update={"seconds": seconds})
