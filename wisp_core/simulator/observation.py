"""What a simulated replica reports: the same snapshot as a real one, so that policies cannot tell."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import CostFit, DemandBin, KvDemand, PagerCounts, ReplicaSnapshot, ReuseBin
from wisp_core.simulator.replica import NUM_AMOUNTS, Replica
from wisp_core.working_set.forgetting import Forgetting

_LEAST_WEIGHT = 1e-9
"""Of a mix or a comeback that still counts."""


class _Sample(NamedTuple):
    at_s: float
    decode_steps: float
    decode_tokens: float
    passes: float
    pass_tokens: float
    turn_seconds: float
    busy_s: float
    peak_blocks: int


class _Rates(NamedTuple):
    """Per second; what is a window old weighs 1/e, as an engine reports it."""

    decode_steps: float
    decode_tokens: float
    passes: float
    pass_tokens: float
    busy_s: float


class Observer:
    """Turns a replica's totals into snapshots: rates decay as an engine's do, peaks and means are of a window."""

    def __init__(self, replica: Replica, replica_id: str, window_s: float, *, link: float = 1.0, curve: float = 1.0):
        """``link`` and ``curve`` are what the replica's report says, as a factor of what is true."""
        self._replica = replica
        self._replica_id = replica_id
        self._window_s = window_s
        self._memory = Forgetting(window_s)
        self._memory.keep(0.0)  # the first sample's moment
        self._link, self._curve = link, curve
        self._samples: deque[_Sample] = deque([_Sample(*[0] * len(_Sample._fields))])
        self._sums = np.zeros(len(_Rates._fields))
        self._span_s = 0.0
        self._mix: dict[tuple[int, int], float] = {}
        self._comebacks: dict[int, float] = {}
        curves, layers, most = replica.model.curves, replica.model.layout.num_layers, replica.model.layout.max_num_seqs
        self._union = (0.0, *(distinct / layers for distinct in curves.distinct_by_batch(most)))

    def snapshot(self, now_s: float) -> ReplicaSnapshot:
        """State, demand, curves and rates at ``now_s``."""
        replica, model = self._replica, self._replica.model
        first, last = self._sample(now_s)
        span_s = max(now_s - first.at_s, 1e-9)
        keep = self._memory.keep(now_s)
        rates = self._rates(self._samples[-2], last, keep)
        totals = replica.totals
        decode = PagerCounts(
            steps=round(totals.decode_steps),
            tokens=round(totals.decode_tokens),
            misses=round(totals.decode_misses),
            missed_bytes=round(totals.decode_misses * model.layout.expert_bytes),
            distinct=round(totals.decode_distinct),
            seconds=totals.decode_s,
            link_seconds=totals.decode_link_s,
        )
        prefill = PagerCounts(
            steps=totals.passes,
            tokens=totals.pass_tokens,
            misses=round(totals.pass_misses),
            missed_bytes=round(totals.pass_misses * model.layout.expert_bytes),
            seconds=totals.pass_s,
            link_seconds=min(totals.pass_link_s, totals.pass_s),
        )
        pass_tokens = totals.pass_tokens // totals.passes if totals.passes else 0
        caps = range(model.layout.num_experts + 1)
        return ReplicaSnapshot(
            at_s=now_s,
            replica_id=self._replica_id,
            incarnation="simulated",
            model=model.name,
            layout=model.layout,
            split=replica.split,
            budget_bytes=model.budget_bytes,
            window_s=self._span_s,
            decode=decode,
            prefill=prefill,
            decode_steps_per_s=rates.decode_steps,
            decode_tokens_per_s=rates.decode_tokens,
            prefill_steps_per_s=rates.passes,
            prefill_tokens_per_s=rates.pass_tokens,
            decode_misses_by_cap=self._decode_curve(keep),
            prefill_misses_by_cap=tuple(self._curve * model.pass_misses(cap, pass_tokens) for cap in caps)
            if pass_tokens
            else (),
            decode_union_by_batch=self._union,
            busy_s_per_s=rates.busy_s,
            fit=self._fit(),
            link_bytes_per_s=model.link_bytes_per_s / model.stretch * self._link,
            kv=self._demand(now_s, first, last, span_s),
        )

    def _sample(self, now_s: float) -> tuple[_Sample, _Sample]:
        """The oldest sample of the window and the one taken now."""
        replica, totals = self._replica, self._replica.totals
        replica.observe(now_s)
        last = _Sample(
            now_s,
            totals.decode_steps,
            totals.decode_tokens,
            totals.passes,
            totals.pass_tokens,
            totals.turn_seconds,
            totals.busy_s,
            max(replica.peak_demand_blocks, replica.demand_blocks),
        )
        replica.peak_demand_blocks = replica.demand_blocks
        self._samples.append(last)
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - self._window_s:
            self._samples.popleft()
        return self._samples[0], last

    def _rates(self, before: _Sample, last: _Sample, keep: float) -> _Rates:
        """With what happened between the two; what was before weighs ``keep``."""
        since_s = last.at_s - before.at_s
        new = [getattr(last, name) - getattr(before, name) for name in _Rates._fields]
        self._sums = keep * self._sums + new
        self._span_s = keep * self._span_s + since_s
        return _Rates(*(self._sums / max(self._span_s, 1e-9)).tolist())

    def _decode_curve(self, keep: float) -> tuple[float, ...]:
        """Mean of the curves of the mixes that ran, recent steps weighing more, comebacks spread over them."""
        replica = self._replica
        self._mix = {mix: steps * keep for mix, steps in self._mix.items() if steps * keep > _LEAST_WEIGHT}
        for mix, steps in replica.mix.items():
            self._mix[mix] = self._mix.get(mix, 0.0) + steps
        self._comebacks = {
            others: count * keep for others, count in self._comebacks.items() if count * keep > _LEAST_WEIGHT
        }
        for others, count in replica.comebacks.items():
            self._comebacks[others] = self._comebacks.get(others, 0.0) + count
        replica.mix.clear()
        replica.comebacks.clear()
        total = sum(self._mix.values())
        if not total:
            return ()
        curves = replica.model.curves
        mean = sum(np.array(curves.by_cap(*mix)) * (steps / total) for mix, steps in self._mix.items())
        back = sum(curves.comeback_by_cap(others) * (count / total) for others, count in self._comebacks.items())
        # A real curve never rises; what comebacks were measured to cost has noise.
        return tuple((np.minimum.accumulate(np.asarray(mean) + np.asarray(back)) * self._curve).tolist())

    def _demand(self, now_s: float, first: _Sample, last: _Sample, span_s: float) -> KvDemand:
        replica = self._replica
        asked = replica.asked.rates(now_s, now_s)
        turns, prompt_tokens, prompt_passes, output_tokens = asked[:NUM_AMOUNTS].tolist()
        return KvDemand(
            running_turns=replica.num_running,
            waiting_turns=len(replica.waiting),
            floor_blocks=replica.floor_blocks,
            demand_blocks=max(sample.peak_blocks for sample in self._samples),
            used_blocks=replica.cache.running_blocks,
            cached_blocks=replica.cache.cached_blocks,
            mean_turns=(last.turn_seconds - first.turn_seconds) / span_s,
            prompt_tokens_per_s=prompt_tokens,
            prompt_passes_per_s=prompt_passes,
            turns_per_s=turns,
            output_tokens_per_s=output_tokens,
            demand=tuple(DemandBin(blocks=blocks, share=share) for blocks, share in replica.demand.bins()),
            reuse=self._reuse_bins(asked[NUM_AMOUNTS:]),
            return_share=replica.returns.share(now_s),
        )

    def _fit(self) -> CostFit:
        """What a fit to the replica's own steps finds: where copies hide compute, what they leave of it."""
        model, totals = self._replica.model, self._replica.totals
        pass_s, prompt_token_s = model.pass_s, model.token_s
        if model.is_pass_overlapped and totals.pass_tokens:
            pass_s, prompt_token_s = 0.0, max(0.0, totals.pass_s - totals.pass_link_s) / totals.pass_tokens
        # The cost model knows compute by row; what distinct experts cost is in it at the mean batch.
        batch = max(1.0, totals.decode_tokens / totals.decode_steps) if totals.decode_steps else 1.0
        distinct = totals.decode_distinct / totals.decode_steps if totals.decode_steps else 0.0
        return CostFit(
            step_s=model.step_s,
            token_s=model.row_s + model.distinct_s * distinct / batch,
            pass_s=pass_s,
            prompt_token_s=prompt_token_s,
            num_samples=round(totals.decode_steps),
        )

    def _reuse_bins(self, rates: npt.NDArray[np.float64]) -> tuple[ReuseBin, ...]:
        return tuple(
            ReuseBin(blocks=blocks, turns_per_s=turns, tokens_per_s=tokens, passes_per_s=passes)
            for blocks, (turns, tokens, passes) in zip(self._replica.edges, rates.reshape(-1, 3).tolist(), strict=True)
            if tokens > 0
        )
