"""What a simulation gives: every turn's times, and sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import Split
from wisp_core.simulator.totals import Totals
from wisp_core.simulator.trace import Trace

FloatArray = npt.NDArray[np.float64]


class Resize(NamedTuple):
    """One resize that was applied."""

    at_s: float
    replica: int
    before: Split
    after: Split
    bytes_moved: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulationResult:
    """Times by turn, in the trace's order, seconds since the start; NaN for refused turns."""

    trace: Trace
    arrived_s: FloatArray
    first_token_s: FloatArray
    ended_s: FloatArray
    replica_of: npt.NDArray[np.int32]
    turn_overhead_s: float
    expert_bytes: int
    totals: tuple[Totals, ...]
    splits: tuple[Split, ...]
    """At the end, by replica."""
    resizes: tuple[Resize, ...]
    num_deferred: int

    @property
    def latency_s(self) -> FloatArray:
        """Arrival to end, as a client sees it."""
        return self.ended_s - self.arrived_s + self.turn_overhead_s

    @property
    def ttft_s(self) -> FloatArray:
        """Arrival to first token, as a client sees it."""
        return self.first_token_s - self.arrived_s + self.turn_overhead_s

    @property
    def makespan_s(self) -> float:
        """When the last turn ended."""
        return float(np.nanmax(self.ended_s))

    @property
    def mean_turn_s(self) -> float:
        """Mean latency of a turn."""
        return float(np.nanmean(self.latency_s))

    @property
    def missed_bytes(self) -> float:
        """Expert bytes copied, decode and prefill."""
        misses = sum(t.decode_misses + t.comeback_misses + t.pass_misses for t in self.totals)
        return misses * self.expert_bytes

    @property
    def decode_missed_bytes_per_token(self) -> float:
        """Expert bytes that decode copies per output token."""
        misses = sum(t.decode_misses + t.comeback_misses for t in self.totals)
        tokens = sum(t.decode_tokens + t.decode_tokens_in_passes for t in self.totals)
        return misses * self.expert_bytes / tokens if tokens else 0.0

    def summary(self) -> dict[str, float]:
        """The figures of a table's row."""
        latency_s, ttft_s = self.latency_s, self.ttft_s
        totals = self.totals
        prompt_tokens = sum(t.prompt_tokens for t in totals)
        return {
            "turns": int(np.isfinite(latency_s).sum()),
            "refused": int(np.isnan(latency_s).sum()),
            "mean_turn_s": self.mean_turn_s,
            "p95_turn_s": float(np.nanpercentile(latency_s, 95)),
            "mean_ttft_s": float(np.nanmean(ttft_s)),
            "p95_ttft_s": float(np.nanpercentile(ttft_s, 95)),
            "turns_per_s": int(np.isfinite(latency_s).sum()) / self.makespan_s,
            "makespan_s": self.makespan_s,
            "busy_share": sum(t.busy_s for t in totals) / (self.makespan_s * len(totals)),
            "decode_missed_bytes_per_token": self.decode_missed_bytes_per_token,
            "missed_bytes": self.missed_bytes,
            "prefix_hit_share": sum(t.hit_tokens for t in totals) / prompt_tokens if prompt_tokens else 0.0,
            "resizes": len(self.resizes),
            "bytes_moved": sum(resize.bytes_moved for resize in self.resizes),
        }
