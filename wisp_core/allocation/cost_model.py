"""What a split costs, predicted from one snapshot: engine seconds per second of wall time, both pools in that unit.

::

    cost(C, K) = steps(K)  * (step_s + batch(K) * token_s + misses(C, batch(K)) * expert_bytes / B)
               + passes(K) * (pass_s + pass_misses(C) * expert_bytes / B)
               + tokens(K) * prompt_token_s

C is the cap, K the usable KV blocks, B the link. A prefill is a *pass*: it brings each expert without a slot over the
link once, whatever its length, so it is counted in passes and only its arithmetic in tokens.

- **Reuse.** ``tokens(K)`` and ``passes(K)`` are what the admitted prompts would take with no prefix cache, less what
  the reuse at a distance of up to K blocks saves (LRU stack distances). A turn needs one pass for its new tokens
  anyhow. Both are demand, so they hold whatever the split was when they were measured. Where a host tier brings lost
  prefixes back, a lost one costs the cheaper of fetching and computing it.
- **Admission.** Where turns need more than K blocks in full, they run in smaller batches. A smaller batch takes more
  steps for the same tokens: ``ρ(K)`` is the mean of min(1, K / demand) over the time-shares of demand, relative to
  that of now.
- **Steps.** Turns also decode in the steps that prefill, a token each, so ``steps(K)`` are the output tokens over the
  batch, less the passes.
- **Union.** A batch of another size needs ``u = union(batch) / union(batch now)`` times the experts of a step, by the
  measured curve of union over batch. Where a step's union fits the cap, what is missed are experts of long ago, and
  a lookup misses as often in any batch; where it does not, the miss curve stretches with u. So KV has a price of its
  own: a larger batch can outgrow the cap.
- **Preemption.** Tokens that preempted turns lost are computed again; they fall with the demand above K, and are gone
  where K holds all of it.

All demand is per turn, of the turns that are there and of those that have ended lately: rates of steps and passes say
what the engine did with its time, which is another matter while a pool is too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wisp_core.contracts import CostFit, MemoryLayout, PagerCounts, ReplicaSnapshot, ReuseBin, Split
from wisp_core.working_set.union_power import power_union

_ROOM = 1.15
"""A step's union fits a cap of so many times its size: below, experts of this step push out those of the next."""


@dataclass(frozen=True, kw_only=True)
class CostTerms:
    """Engine seconds per second of wall time, by cause."""

    decode_link_s: float
    decode_compute_s: float
    prefill_link_s: float
    prefill_compute_s: float

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.decode_link_s + self.decode_compute_s + self.prefill_link_s + self.prefill_compute_s


@dataclass(frozen=True, kw_only=True)
class MoveTerms:
    """Seconds that a move costs once, before the new split is worth what it promises."""

    experts_s: float
    kv_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.experts_s + self.kv_s


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The constants of the formula above. Build it with `from_snapshot`; a simulator may build its own."""

    layout: MemoryLayout
    split: Split
    """The split in effect, to which batch and union are relative."""
    copy_s: float
    """Seconds that one expert takes over the link."""
    fit: CostFit
    output_tokens_per_s: float
    """Tokens to decode, in decode steps and in passes."""
    batch: float
    """Tokens of a mean decode step."""
    decode_misses_by_cap: tuple[float, ...]
    union_by_batch: tuple[float, ...]
    pass_misses_by_cap: tuple[float, ...]
    prompt_tokens_per_s: float
    prompt_passes_per_s: float
    pass_tokens: float
    """Prompt tokens of a pass, for work that is known in tokens only."""
    do_passes_decode: bool
    """Whether ``output_tokens_per_s`` counts the tokens that turns decode in steps which also prefill."""
    preempted_tokens_per_s: float
    fetch_s_per_token: float
    """Seconds to bring a lost token's KV back from a host tier; infinite without one."""
    host_blocks: float
    """Distance up to which that tier keeps what was lost."""
    demand: tuple[tuple[float, float], ...]
    """``(blocks needed in full, share of the time)``; empty: KV never limits the batch."""
    reuse: tuple[ReuseBin, ...]
    growth_fraction: float = 0.0

    @classmethod
    def from_snapshot(
        cls,
        snapshot: ReplicaSnapshot,
        reuse: Sequence[ReuseBin] | None = None,
        *,
        growth_fraction: float = 0.0,
    ) -> CostModel:
        """Take the constants from ``snapshot``, of which ``missing_evidence`` must be None.

        Args:
            snapshot: What the replica reported.
            reuse: What to expect of prefix reuse; None: what was measured.
            growth_fraction: Distances of reuse and demand are taken to lie evenly between what was measured and this
                much more.
        """
        layout, kv = snapshot.layout, snapshot.kv
        reuse = kv.reuse if reuse is None else reuse
        fetch_bytes = layout.block_bytes / layout.block_tokens
        return cls(
            layout=layout,
            split=snapshot.split,
            copy_s=layout.expert_bytes / snapshot.link_bytes_per_s,
            fit=_fit(snapshot),
            output_tokens_per_s=_output_tokens_per_s(snapshot),
            batch=_batch(snapshot),
            decode_misses_by_cap=_decode_misses(snapshot),
            union_by_batch=_union_by_batch(snapshot),
            pass_misses_by_cap=_pass_misses(snapshot),
            prompt_tokens_per_s=_prompt_tokens_per_s(snapshot),
            prompt_passes_per_s=_prompt_passes_per_s(snapshot),
            pass_tokens=_tokens_per_pass(snapshot),
            do_passes_decode=snapshot.kv.output_tokens_per_s > 0,
            preempted_tokens_per_s=kv.preempted_tokens_per_s,
            fetch_s_per_token=fetch_bytes / kv.fetch_bytes_per_s if kv.fetch_bytes_per_s > 0 else math.inf,
            host_blocks=math.inf if kv.host_blocks is None else kv.host_blocks,
            demand=_demand(snapshot),
            reuse=tuple(_with_passes(one, snapshot) for one in reuse),
            growth_fraction=growth_fraction,
        )

    def terms(self, split: Split) -> CostTerms:
        """Predicted cost of ``split``."""
        relative = self._batch_held(split.kv_blocks) / self._batch_held(self.split.kv_blocks)
        batch = max(1.0, self.batch * relative)
        tokens, passes, fetch_s = self._prefills(split)
        again = self._preempted_tokens_per_s(split.kv_blocks)
        passes += again / self.pass_tokens
        steps_per_s = max(0.0, self.output_tokens_per_s / batch - (passes if self.do_passes_decode else 0.0))
        return CostTerms(
            decode_link_s=steps_per_s * self.decode_misses(split.cap, batch) * self.copy_s,
            decode_compute_s=steps_per_s * (self.fit.step_s + batch * self.fit.token_s),
            prefill_link_s=passes * self.pass_misses_by_cap[split.cap] * self.copy_s,
            prefill_compute_s=passes * self.fit.pass_s + (tokens + again) * self.fit.prompt_token_s + fetch_s,
        )

    def cost(self, split: Split) -> float:
        """Predicted engine seconds per second of wall time at ``split``."""
        return self.terms(split).total_s

    def decode_misses(self, cap: int, batch: float) -> float:
        """Expected misses over all layers of a decode step of ``batch`` tokens at ``cap``."""
        here, there = self._union(self.batch), self._union(batch)
        ratio = there / here
        is_fitting = cap >= _ROOM * there
        same = max(float(cap), _ROOM * here) if is_fitting else cap / ratio
        return ratio * _interpolate(self.decode_misses_by_cap, same)

    def move(self, target: Split) -> MoveTerms:
        """What moving from the split in effect to ``target`` costs once.

        What grows is worth its size only once it is full, and filling begins at once: half of the worth is lost on the
        way. New slots are filled by one copy each, new blocks by the prefixes that they are there to keep.
        """
        more_slots = max(0, target.cap - self.split.cap) * self.layout.num_layers
        more_tokens = max(0, target.kv_blocks - self.split.kv_blocks) * self.layout.block_tokens
        kv_s = tokens = 0.0
        for one in self.reuse if more_tokens else ():
            gained = self._kept(one.blocks, target.kv_blocks) - self._kept(one.blocks, self.split.kv_blocks)
            tokens += gained * one.tokens_per_s
            kv_s += gained * min(self._lost_s(one, target.cap), self._fetched_s(one))
        kv_s = more_tokens * kv_s / tokens / 2 if tokens > 0 else 0.0
        return MoveTerms(experts_s=more_slots * self.copy_s / 2, kv_s=kv_s)

    def _prefills(self, split: Split) -> tuple[float, float, float]:
        """Tokens and passes to compute and seconds to fetch, all per second, at ``split``."""
        tokens, passes, fetch_s = self.prompt_tokens_per_s, self.prompt_passes_per_s, 0.0
        for one in self.reuse:
            kept = self._kept(one.blocks, split.kv_blocks)
            fetched_s = self._fetched_s(one)
            saved = 1.0 if fetched_s < self._lost_s(one, split.cap) else kept
            tokens -= saved * one.tokens_per_s
            passes -= saved * one.passes_per_s
            fetch_s += (saved - kept) * fetched_s if saved > kept else 0.0  # infinite without a host tier
        return max(0.0, tokens), max(0.0, passes), fetch_s

    def _kept(self, distance: float, kv_blocks: int) -> float:
        """Part of the reuse at ``distance`` that ``kv_blocks`` keep, 0 to 1."""
        if self.growth_fraction <= 0:
            return 1.0 if distance <= kv_blocks else 0.0
        return min(1.0, max(0.0, (kv_blocks / max(distance, 1) - 1.0) / self.growth_fraction))

    def _lost_s(self, lost: ReuseBin, cap: int) -> float:
        """Seconds per second to compute what ``lost`` would have saved."""
        pass_s = self.fit.pass_s + self.pass_misses_by_cap[cap] * self.copy_s
        return lost.passes_per_s * pass_s + lost.tokens_per_s * self.fit.prompt_token_s

    def _fetched_s(self, lost: ReuseBin) -> float:
        """Seconds per second to fetch it from the host tier; infinite where that has not kept it."""
        return lost.tokens_per_s * self.fetch_s_per_token if lost.blocks <= self.host_blocks else math.inf

    def _preempted_tokens_per_s(self, kv_blocks: int) -> float:
        here = self._excess(self.split.kv_blocks)
        return self.preempted_tokens_per_s * min(4.0, self._excess(kv_blocks) / here) if here > 0 else 0.0

    def _excess(self, kv_blocks: int) -> float:
        """Mean blocks that are demanded beyond ``kv_blocks``."""
        return sum(share * max(0.0, blocks - kv_blocks) for blocks, share in self.demand)

    def _batch_held(self, kv_blocks: int) -> float:
        """Part of the demanded batch that ``kv_blocks`` hold at once, mean over time, in (0, 1]."""
        if not self.demand:
            return 1.0
        held = max(kv_blocks, 1) / (1.0 + self.growth_fraction / 2)
        return sum(share * min(1.0, held / blocks) for blocks, share in self.demand)

    def _union(self, batch: float) -> float:
        if self.union_by_batch:
            return union_size(self.union_by_batch, batch, most=self.layout.num_experts)
        return 1.0


def union_size(by_batch: Sequence[float], rows: float, *, most: float) -> float:
    """Distinct experts of one layer that ``rows`` decode rows need, which need not be whole.

    Between known batches a straight line; beyond the last one the growth, as a power of the batch, that the second
    half of the curve shows.

    Args:
        by_batch: index b: distinct experts of b rows; index 0 is 0; at least one batch.
        rows: rows of the batch, above 0.
        most: experts of a layer.
    """
    last = len(by_batch) - 1
    if rows <= 1:
        return min(most, by_batch[1])  # a step has one row at least
    if rows <= last:
        return min(most, _interpolate(by_batch, rows))
    middle = max(1, last // 2)
    growth = 1.0 if last == 1 else math.log(max(by_batch[last] / by_batch[middle], 1.0)) / math.log(last / middle)
    return min(most, by_batch[last] * math.pow(rows / last, min(growth, 1.0)))


def missing_evidence(snapshot: ReplicaSnapshot) -> str | None:
    """Why ``snapshot`` says too little to predict a cost; None when it says enough."""
    if snapshot.decode_steps_per_s <= 0 and snapshot.kv.output_tokens_per_s <= 0:
        return "no turn in the window"
    if snapshot.link_bytes_per_s <= 0:
        return "link speed not measured yet"
    return None


def model_error(model: CostModel, snapshot: ReplicaSnapshot) -> float | None:
    """|predicted - measured| / measured engine time of the forwards that ran; None where it was not measured.

    Not of what turns ask for: where that is more than the engine can do, it is busy all the time and no more.
    """
    if snapshot.busy_s_per_s <= 0:
        return None
    cap, fit, steps_per_s = snapshot.split.cap, model.fit, snapshot.decode_steps_per_s
    misses = _seen_decode_misses(snapshot)[cap]
    decode_s = steps_per_s * (fit.step_s + model.batch * fit.token_s + misses * model.copy_s)
    pass_s = fit.pass_s + model.pass_misses_by_cap[cap] * model.copy_s
    prefill_s = snapshot.prefill_steps_per_s * pass_s + snapshot.prefill_tokens_per_s * fit.prompt_token_s
    return abs(decode_s + prefill_s - snapshot.busy_s_per_s) / snapshot.busy_s_per_s


def _interpolate(curve: Sequence[float], place: float) -> float:
    """The curve between two whole places; its last value beyond the end."""
    lower = min(int(place), len(curve) - 1)
    upper = min(lower + 1, len(curve) - 1)
    return curve[lower] + (curve[upper] - curve[lower]) * (min(place, upper) - lower)


def _output_tokens_per_s(snapshot: ReplicaSnapshot) -> float:
    """What the admitted turns ask for, which holds also while prefills hold up all decoding; else what was decoded."""
    if snapshot.kv.output_tokens_per_s > 0:
        return snapshot.kv.output_tokens_per_s
    return snapshot.decode_steps_per_s * _batch(snapshot)


def _batch(snapshot: ReplicaSnapshot) -> float:
    """Tokens of a mean decode step; before any, as many as there are turns."""
    if snapshot.decode_tokens_per_s > 0 and snapshot.decode_steps_per_s > 0:
        return max(1.0, snapshot.decode_tokens_per_s / snapshot.decode_steps_per_s)
    if snapshot.decode.steps:
        return max(1.0, snapshot.decode.tokens / snapshot.decode.steps)
    return float(max(1, snapshot.kv.running_turns))


def _fit(snapshot: ReplicaSnapshot) -> CostFit:
    """The fitted constants, else means since the start with all time per step (decode) and per token (prefill)."""
    if snapshot.fit.num_samples:
        return snapshot.fit
    decode, prefill = snapshot.decode, snapshot.prefill
    return CostFit(
        step_s=_compute_s(decode, decode.steps),
        prompt_token_s=_compute_s(prefill, prefill.tokens),
    )


def _compute_s(counts: PagerCounts, num_units: int) -> float:
    """Seconds per unit that are not spent on the link."""
    return max(0.0, counts.seconds - counts.link_seconds) / num_units if num_units else 0.0


def _decode_misses(snapshot: ReplicaSnapshot) -> tuple[float, ...]:
    """The curve seen, scaled to the sessions placed here where they are known to differ from those seen."""
    curve, ratios = _seen_decode_misses(snapshot), snapshot.placed_miss_ratio_by_cap
    if not snapshot.decode_misses_by_cap or len(ratios) != len(curve):
        return curve
    return tuple(misses * ratio for misses, ratio in zip(curve, ratios, strict=True))


def _seen_decode_misses(snapshot: ReplicaSnapshot) -> tuple[float, ...]:
    """The measured curve.

    Before anything is measured, as while prompts are computed in every step, that of routing without any preference:
    worse than it will be, and soon replaced.
    """
    layout, curve = snapshot.layout, snapshot.decode_misses_by_cap
    if len(curve) == layout.num_experts + 1:
        return curve
    union = layout.num_experts * (1.0 - (1.0 - layout.top_k / layout.num_experts) ** _batch(snapshot))
    missed = (layout.num_layers * union * (1.0 - cap / layout.num_experts) for cap in range(layout.num_experts + 1))
    return tuple(missed)


def _union_by_batch(snapshot: ReplicaSnapshot) -> tuple[float, ...]:
    """The measured curve, else the power of the batch through one token's top-k and the mean step."""
    if len(snapshot.decode_union_by_batch) > 1:
        return snapshot.decode_union_by_batch
    decode, layout = snapshot.decode, snapshot.layout
    if decode.steps == 0:
        return ()
    return power_union(
        batch=decode.tokens / decode.steps,
        union=decode.distinct / (decode.steps * layout.num_layers),
        top_k=layout.top_k,
        rows=layout.max_num_seqs,
    )


def _pass_misses(snapshot: ReplicaSnapshot) -> tuple[float, ...]:
    """Misses of one prefill step by cap; without a curve, a pass over every expert that is not resident."""
    layout = snapshot.layout
    if len(snapshot.prefill_misses_by_cap) == layout.num_experts + 1:
        return snapshot.prefill_misses_by_cap
    return tuple(float(layout.num_layers * (layout.num_experts - cap)) for cap in range(layout.num_experts + 1))


def _prompt_tokens_per_s(snapshot: ReplicaSnapshot) -> float:
    """Prompt tokens that turns bring, whether prefilled or found in the prefix cache."""
    if snapshot.kv.prompt_tokens_per_s > 0:
        return snapshot.kv.prompt_tokens_per_s
    reused = (one.tokens_per_s for one in snapshot.kv.reuse if one.blocks <= snapshot.split.kv_blocks)
    return snapshot.prefill_tokens_per_s + sum(reused)


def _prompt_passes_per_s(snapshot: ReplicaSnapshot) -> float:
    """Passes that the prompts would take without a prefix cache."""
    if snapshot.kv.prompt_passes_per_s > 0:
        return snapshot.kv.prompt_passes_per_s
    return _prompt_tokens_per_s(snapshot) / _tokens_per_pass(snapshot)


def _with_passes(one: ReuseBin, snapshot: ReplicaSnapshot) -> ReuseBin:
    """``one`` with the passes that its tokens save, where they were not counted turn by turn."""
    if snapshot.kv.prompt_passes_per_s > 0:
        return one
    return one.model_copy(update={"passes_per_s": one.tokens_per_s / _tokens_per_pass(snapshot)})


def _tokens_per_pass(snapshot: ReplicaSnapshot) -> float:
    """Tokens of a mean prefill step: in the window, else since start, else one pass per turn that reuses a prefix."""
    if snapshot.prefill_steps_per_s > 0 and snapshot.prefill_tokens_per_s > 0:
        return snapshot.prefill_tokens_per_s / snapshot.prefill_steps_per_s
    if snapshot.prefill.steps and snapshot.prefill.tokens:
        return snapshot.prefill.tokens / snapshot.prefill.steps
    tokens = sum(one.tokens_per_s for one in snapshot.kv.reuse)
    turns = sum(one.turns_per_s for one in snapshot.kv.reuse)
    return tokens / turns if tokens > 0 and turns > 0 else 1.0


def _demand(snapshot: ReplicaSnapshot) -> tuple[tuple[float, float], ...]:
    """Blocks needed in full over time, without turns that wait for the engine's own limit rather than for KV."""
    kv, layout = snapshot.kv, snapshot.layout
    runnable = min(1.0, layout.max_num_seqs / kv.mean_turns) if kv.mean_turns > 0 else 1.0
    if kv.demand:
        return tuple((one.blocks * runnable, one.share) for one in kv.demand if one.blocks > 0)
    return ((kv.demand_blocks * runnable, 1.0),) if kv.demand_blocks > 0 else ()
