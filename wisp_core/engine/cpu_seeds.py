"""Seeded requests under chunked prefill on CPU, of which vLLM 0.32.0 dies.

After each chunk but the last, vLLM throws the sampled token away and winds the request's generator back by its offset.
A CPU generator has none, so the engine dies with "CPU Generator does not use offset". Here such draws come from a
scratch generator, and the request's own is as if nothing was drawn: what vLLM means to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class _ScratchGenerator(torch.Generator):  # type: ignore[misc]
    """Its draws are thrown away, so where it stands does not matter."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Nothing to wind back."""


class CpuSeedsMixin:
    """For a worker class in front of vLLM's CPUWorker."""

    model_runner: Any

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample the step's tokens; requests in the middle of their prompt do not spend their generator."""
        with _unspent_generators(self.model_runner):
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def _unspent_generators(model_runner: Any) -> Iterator[None]:
    generators = model_runner.input_batch.generators
    num_requests = model_runner.input_batch.num_reqs
    discarded = np.flatnonzero(model_runner.discard_request_mask.np[:num_requests]).tolist()
    kept = {index: generators[index] for index in discarded if index in generators}
    generators.update((index, _ScratchGenerator()) for index in kept)
    try:
        yield
    finally:
        generators.update(kept)
