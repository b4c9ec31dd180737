"""What a split costs, predicted from one snapshot: engine seconds per second of wall time, both pools in that unit.

::

    cost(C, K) = steps(K)  · (u · decode_misses(C / u) · expert_bytes / B  +  compute seconds per step)
               + tokens(K) · (prefill_misses(C) / tokens per pass · expert_bytes / B  +  compute seconds per token)

C is the cap, K the usable KV blocks, B the link. What depends on K:

- Prefix reuse. ``tokens(K)`` are the prompt tokens prefilled per second: those of admitted turns less the reuse that K
  blocks keep (bins at a distance up to K). This is demand, so it holds whatever the split was in the window. Where
  ``kv.prompt_tokens_per_s`` is not measured it is taken from the observed prefills and the reuse that the split of
  now keeps, which is off until the window holds one split only.
- Admission. Turns that need ``demand_blocks`` in full run together only as far as K holds them; the others wait or
  are preempted. A smaller batch needs more steps for the same tokens: ``ρ(K)`` is the batch relative to now and
  ``steps(K)`` is the observed rate over ρ. The experts of a batch grow as batch^γ, with γ fitted between one token
  (top-k) and the observed batch (its distinct experts), so the union is ``u = ρ^γ`` times that of now; the miss curve
  is taken to keep its shape and to stretch with the union, in slots as well as in misses. So KV has a price of its
  own: a larger batch can outgrow the cap.

A lost prefix is charged like the prefills measured in the window, per token. A pager that fetches each expert once
per pass, however long, pays less than that for prefixes shorter than its chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wisp_core.contracts import MemoryLayout, PagerCounts, ReplicaSnapshot, ReuseBin, Split


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
class CostModel:
    """The constants of the formula above."""

    decode_steps_per_s: float
    decode_link_s_by_cap: tuple[float, ...]
    decode_compute_s_per_step: float
    sharing_exponent: float
    demand_blocks: float
    current_kv_blocks: int
    prompt_tokens_per_s: float
    prefill_link_s_per_token_by_cap: tuple[float, ...]
    prefill_compute_s_per_token: float
    reuse: tuple[ReuseBin, ...]

    @classmethod
    def from_snapshot(cls, snapshot: ReplicaSnapshot) -> CostModel:
        """Take the constants from ``snapshot``, of which ``missing_evidence`` must be None."""
        layout, kv = snapshot.layout, snapshot.kv
        copy_s = layout.expert_bytes / snapshot.link_bytes_per_s
        pass_tokens = _tokens_per_pass(snapshot)
        # More turns than the engine runs at once wait in any case, not for KV.
        runnable = min(1.0, layout.max_num_seqs / kv.mean_turns) if kv.mean_turns > 0 else 1.0
        return cls(
            decode_steps_per_s=snapshot.decode_steps_per_s,
            decode_link_s_by_cap=tuple(m * copy_s for m in snapshot.decode_misses_by_cap),
            decode_compute_s_per_step=_compute_s(snapshot.decode, snapshot.decode.steps),
            sharing_exponent=_sharing_exponent(snapshot.decode, layout),
            demand_blocks=kv.demand_blocks * runnable,
            current_kv_blocks=snapshot.split.kv_blocks,
            prompt_tokens_per_s=_prompt_tokens_per_s(snapshot),
            prefill_link_s_per_token_by_cap=tuple(m * copy_s / pass_tokens for m in _prefill_misses(snapshot)),
            prefill_compute_s_per_token=_compute_s(snapshot.prefill, snapshot.prefill.tokens),
            reuse=kv.reuse,
        )

    def terms(self, split: Split) -> CostTerms:
        """Predicted cost of ``split``."""
        batch = self._batch_held(split.kv_blocks) / self._batch_held(self.current_kv_blocks)
        steps_per_s = self.decode_steps_per_s / batch
        prefilled_per_s = self._prefilled_tokens_per_s(split.kv_blocks)
        union = batch**self.sharing_exponent
        link_s = union * _interpolate(self.decode_link_s_by_cap, split.cap / union)
        return CostTerms(
            decode_link_s=steps_per_s * link_s,
            decode_compute_s=steps_per_s * self.decode_compute_s_per_step,
            prefill_link_s=prefilled_per_s * self.prefill_link_s_per_token_by_cap[split.cap],
            prefill_compute_s=prefilled_per_s * self.prefill_compute_s_per_token,
        )

    def cost(self, split: Split) -> float:
        """Predicted engine seconds per second of wall time at ``split``."""
        return self.terms(split).total_s

    def _batch_held(self, kv_blocks: int) -> float:
        """Part of the demanded batch that ``kv_blocks`` hold at once, in (0, 1]."""
        if self.demand_blocks <= 0:
            return 1.0
        return min(1.0, max(kv_blocks, 1) / self.demand_blocks)

    def _prefilled_tokens_per_s(self, kv_blocks: int) -> float:
        return max(0.0, self.prompt_tokens_per_s - _kept_tokens_per_s(self.reuse, kv_blocks))


def missing_evidence(snapshot: ReplicaSnapshot) -> str | None:
    """Why ``snapshot`` says too little to predict a cost; None when it says enough."""
    if snapshot.decode_steps_per_s <= 0:
        return "no decode step in the window"
    if len(snapshot.decode_misses_by_cap) != snapshot.layout.num_experts + 1:
        return "no miss curve of decode steps yet"
    if snapshot.link_bytes_per_s <= 0:
        return "link speed not measured yet"
    return None


def _interpolate(by_cap: tuple[float, ...], cap: float) -> float:
    """The curve at a cap between two whole ones; its last value beyond the end."""
    lower = min(int(cap), len(by_cap) - 1)
    upper = min(lower + 1, len(by_cap) - 1)
    return by_cap[lower] + (by_cap[upper] - by_cap[lower]) * (min(cap, upper) - lower)


def _prompt_tokens_per_s(snapshot: ReplicaSnapshot) -> float:
    """Prompt tokens that turns bring, whether prefilled or found in the prefix cache."""
    if snapshot.kv.prompt_tokens_per_s > 0:
        return snapshot.kv.prompt_tokens_per_s
    return snapshot.prefill_tokens_per_s + _kept_tokens_per_s(snapshot.kv.reuse, snapshot.split.kv_blocks)


def _kept_tokens_per_s(reuse: tuple[ReuseBin, ...], kv_blocks: int) -> float:
    return sum(b.tokens_per_s for b in reuse if b.blocks <= kv_blocks)


def _compute_s(counts: PagerCounts, num_units: int) -> float:
    """Seconds per unit that are not spent on the link."""
    return max(0.0, counts.seconds - counts.link_seconds) / num_units if num_units else 0.0


def _prefill_misses(snapshot: ReplicaSnapshot) -> tuple[float, ...]:
    """Misses of one prefill step by cap; without a curve, a pass over every expert that is not resident."""
    layout = snapshot.layout
    if len(snapshot.prefill_misses_by_cap) == layout.num_experts + 1:
        return snapshot.prefill_misses_by_cap
    return tuple(float(layout.num_layers * (layout.num_experts - cap)) for cap in range(layout.num_experts + 1))


def _tokens_per_pass(snapshot: ReplicaSnapshot) -> float:
    """Tokens of a mean prefill step: in the window, else since start, else one pass per turn that reuses a prefix."""
    if snapshot.prefill_steps_per_s > 0 and snapshot.prefill_tokens_per_s > 0:
        return snapshot.prefill_tokens_per_s / snapshot.prefill_steps_per_s
    if snapshot.prefill.steps and snapshot.prefill.tokens:
        return snapshot.prefill.tokens / snapshot.prefill.steps
    tokens = sum(b.tokens_per_s for b in snapshot.kv.reuse)
    turns = sum(b.turns_per_s for b in snapshot.kv.reuse)
    return tokens / turns if tokens > 0 and turns > 0 else 1.0


def _sharing_exponent(decode: PagerCounts, layout: MemoryLayout) -> float:
    """γ of distinct experts = top_k · batch^γ: 0 when the tokens of a batch share all experts, 1 when none."""
    if decode.steps == 0 or decode.tokens <= decode.steps or decode.distinct == 0:
        return 1.0
    batch = decode.tokens / decode.steps
    union = decode.distinct / (decode.steps * layout.num_layers)
    return min(1.0, max(0.0, math.log(union / layout.top_k) / math.log(batch)))
