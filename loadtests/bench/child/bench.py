"""One engine, the link and the memory around it: what every measurement of a benchmark needs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loadtests.bench.child.engine import build_replay, offloaded_bytes, open_engine
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.bench.child.replay import Replay
from loadtests.bench.job import EngineJob
from loadtests.rows import Row
from wisp_core.pager.registry import current_pager


@dataclass(frozen=True, slots=True)
class Bench:
    """A running engine. ``llm`` is vLLM's LLM, ``pager`` None where nothing is paged."""

    mode: str
    llm: Any
    pager: Any
    replay: Replay | None
    memory: GpuMemory
    link_bytes_per_s: float
    link_source: str
    engine_start_s: float

    def facts(self) -> Row:
        """What goes into every row, now."""
        return {
            "link_bytes_per_s": self.link_bytes_per_s,
            "link_source": self.link_source,
            "engine_start_s": self.engine_start_s,
            "peak_gpu_bytes": self.memory.peak_bytes(),
            "peak_gpu_source": self.memory.source,
            "peak_torch_bytes": self.memory.torch_peak_bytes(),
            "offloaded_bytes": offloaded_bytes(),
        }

    def set_cap(self, cap: int) -> None:
        """Change the slots per layer, where there is a pager."""
        if self.pager is None or self.pager.cap == cap:
            return
        self.pager.set_cap(cap)
        trim = getattr(getattr(self.pager, "backing", None), "trim", None)
        if trim is not None:  # pages that no slot needs count as the process's
            trim()

    def set_chunk_tokens(self, num_tokens: int) -> None:
        """Let a step compute at most so many tokens; the engine was started for as many or more."""
        self.llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = num_tokens


@contextmanager
def open_bench(job: EngineJob) -> Iterator[Bench]:
    """Start the engine. Raises RuntimeError when it should have offloaded weights and has not."""
    memory = GpuMemory()
    link_bytes_per_s, link_source = measure_link_bytes_per_s()
    memory.restart()
    replay = build_replay(job.trace)
    started_s = time.perf_counter()
    with open_engine(job, replay) as llm:
        start_s = time.perf_counter() - started_s
        if job.must_offload and offloaded_bytes() == 0:
            raise RuntimeError("nothing was offloaded: every weight is on the device")
        yield Bench(job.mode, llm, current_pager(), replay, memory, link_bytes_per_s, link_source, start_s)
