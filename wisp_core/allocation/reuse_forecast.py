"""Reuse that is about to be seen: sessions whose first turn runs now will come back for their prefix.

Measured reuse lags a phase by a whole turn: a prefix is reused when its session returns, and where the pool is too
small everything takes longer, so that the reuse which would show it is seen last. But agents return, in one phase as in
another. So the share of prompt tokens that is reused is remembered for long, and what the recent prompts fall short of
it is taken to come back at the distance of the work that is there: the blocks that running and waiting turns need.
"""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.contracts import ReplicaSnapshot, ReuseBin

_PRIOR_SHARE = 0.5
_PRIOR_S = 10.0
"""Before anything is seen: half of the prompt tokens come back, believed as firmly as so many seconds of work."""


@dataclass(frozen=True, kw_only=True)
class ReuseMemory:
    """Prompt tokens and those of them that were reused at any distance, both decayed."""

    reused: float = 0.0
    prompted: float = 0.0
    at_s: float | None = None

    def after(self, snapshot: ReplicaSnapshot, memory_s: float) -> ReuseMemory:
        """With what ``snapshot`` has seen since the last one, which then weighs ``1 - elapsed / memory_s``."""
        elapsed_s = 1.0 if self.at_s is None else min(max(0.0, snapshot.at_s - self.at_s), memory_s)
        keep = 1.0 - elapsed_s / memory_s
        return ReuseMemory(
            reused=keep * self.reused + elapsed_s * _reused_per_s(snapshot),
            prompted=keep * self.prompted + elapsed_s * snapshot.kv.prompt_tokens_per_s,
            at_s=snapshot.at_s,
        )

    def share(self, snapshot: ReplicaSnapshot) -> float:
        """Share of prompt tokens to be expected back, 0 to 1."""
        prior = _PRIOR_S * snapshot.kv.prompt_tokens_per_s
        if self.prompted + prior <= 0:
            return _PRIOR_SHARE
        return min(1.0, (self.reused + _PRIOR_SHARE * prior) / (self.prompted + prior))


def forecast(snapshot: ReplicaSnapshot, share: float) -> tuple[ReuseBin, ...]:
    """Measured reuse, and what is missing of ``share`` of the prompt tokens at the distance of the present demand."""
    kv = snapshot.kv
    missing = share * kv.prompt_tokens_per_s - _reused_per_s(snapshot)
    if missing <= 0 or not kv.demand:
        return kv.reuse
    # A turn needs one pass anyhow; the others are saved in proportion to the tokens.
    savable = max(0.0, kv.prompt_passes_per_s - kv.turns_per_s) if kv.turns_per_s > 0 else 0.0
    passes = savable * missing / kv.prompt_tokens_per_s
    expected = [
        ReuseBin(blocks=one.blocks, turns_per_s=0.0, tokens_per_s=missing * one.share, passes_per_s=passes * one.share)
        for one in kv.demand
    ]
    return tuple(sorted([*kv.reuse, *expected], key=lambda one: one.blocks))


def _reused_per_s(snapshot: ReplicaSnapshot) -> float:
    return sum(one.tokens_per_s for one in snapshot.kv.reuse)
