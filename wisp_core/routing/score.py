"""Predicted seconds of a turn on each replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wisp_core.routing.filter import blocks_needed
from wisp_core.routing.views import ReplicaFigures, ReplicaView, RoutingRequest, RoutingWeights, Score, UseRates


def missed_uses(own: UseRates, others: NDArray[np.float32], caps: NDArray[np.intp]) -> NDArray[np.float32]:
    """Expert uses per decode token that would miss because of a session, on each replica.

    With C slots per layer the C most used experts of everybody's union stay resident (what LRU tends to). Counted
    are the session's own uses outside of them, and those of the others that it pushes out.

    Args:
        own: ``[L, E]``, the session's use rates.
        others: ``[N, L, E]``, summed use rates of what runs on each of N replicas.
        caps: ``[N]``, slots per layer, from 1 to E.

    Returns:
        ``[N]``, uses per token of this session.
    """
    missed: NDArray[np.float32] = _missed(others + own, caps) - _missed(others, caps)
    return np.maximum(missed, np.float32(0.0))


def _missed(uses: NDArray[np.float32], caps: NDArray[np.intp]) -> NDArray[np.float32]:
    """Sum of ``uses`` ``[N, L, E]`` outside the C largest of each layer, ``[N]``."""
    num_experts = uses.shape[-1]
    by_rank = np.sort(uses, axis=-1).sum(axis=1)
    is_out = np.arange(num_experts) < (num_experts - caps)[:, None]
    missed: NDArray[np.float32] = np.sum(by_rank, axis=1, where=is_out)
    return missed


def _experts_s(request: RoutingRequest, replicas: Sequence[ReplicaView], weights: RoutingWeights) -> list[float]:
    own = request.use_rates
    if own is None:
        return [0.0] * len(replicas)
    num_experts = own.shape[1]
    figures = [replica.figures for replica in replicas if replica.figures is not None]
    others = np.stack(
        [np.zeros_like(own) if r.use_rates is None or r.use_rates.shape != own.shape else r.use_rates for r in replicas]
    )
    caps = np.clip(np.array([f.cap for f in figures], dtype=np.intp), 1, num_experts)
    bytes_s = np.array([f.expert_bytes / f.link_bytes_per_s for f in figures])
    tokens = min(request.max_tokens, weights.typical_output_tokens)
    seconds: list[float] = (missed_uses(own, others, caps) * bytes_s * tokens).tolist()
    return seconds


def _recompute_s(request: RoutingRequest, replica_id: str, figures: ReplicaFigures) -> float:
    """Prefill of what is not in this replica's prefix cache."""
    cached = min(request.prefix_tokens, request.prompt_tokens) if replica_id == request.home else 0
    return (request.prompt_tokens - cached) * figures.prefill_s_per_token


def _headroom_s(request: RoutingRequest, figures: ReplicaFigures) -> float:
    """Wait for running turns to free the blocks that are short."""
    needed = blocks_needed(request, figures)
    short = max(0, needed - figures.free_blocks)
    return figures.mean_turn_s * short / needed if short else 0.0


def score(request: RoutingRequest, replicas: Sequence[ReplicaView], weights: RoutingWeights) -> dict[str, Score]:
    """Score replicas that all have figures."""
    experts_s = _experts_s(request, replicas, weights)
    scores = {}
    for replica, expert_s in zip(replicas, experts_s, strict=True):
        figures = replica.figures
        assert figures is not None
        scores[replica.replica_id] = Score(
            experts_s=expert_s,
            recompute_s=_recompute_s(request, replica.replica_id, figures),
            queue_s=figures.mean_turn_s * figures.turns / figures.max_num_seqs,
            headroom_s=_headroom_s(request, figures),
            resize_s=weights.resize_s if figures.is_resizing else 0.0,
        )
    return scores
