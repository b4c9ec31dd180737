"""Reuse that is about to be seen: sessions whose first turn runs now will come back for their prefix.

Measured reuse lags a phase by a whole turn: a prefix is reused when its session returns, and where the pool is too
small everything takes longer, so that the reuse which would show it is seen last. But agents return, in one phase as in
another. So the share of turns that are followed by another one, which is remembered over phases, is expected of the
turns that are there now; what the measured reuse falls short of it is taken to come back at the distance of the present
work: the blocks that running and waiting turns need.
"""

from __future__ import annotations

from wisp_core.contracts import ReplicaSnapshot, ReuseBin


def forecast(snapshot: ReplicaSnapshot) -> tuple[ReuseBin, ...]:
    """Measured reuse, and what it lacks of the returning turns' prompts at the distance of the present demand."""
    kv = snapshot.kv
    if kv.return_share is None or not kv.demand:
        return kv.reuse
    missing = kv.return_share * kv.prompt_tokens_per_s - sum(one.tokens_per_s for one in kv.reuse)
    if missing <= 0:
        return kv.reuse
    # A turn needs one pass anyhow; the others are saved in proportion to the tokens.
    savable = max(0.0, kv.prompt_passes_per_s - kv.turns_per_s) if kv.turns_per_s > 0 else 0.0
    passes = savable * missing / kv.prompt_tokens_per_s
    expected = [
        ReuseBin(blocks=one.blocks, turns_per_s=0.0, tokens_per_s=missing * one.share, passes_per_s=passes * one.share)
        for one in kv.demand
    ]
    return tuple(sorted([*kv.reuse, *expected], key=lambda one: one.blocks))
