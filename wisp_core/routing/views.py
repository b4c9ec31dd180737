"""What a routing decision is made from, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wisp_core.contracts import ReplicaSnapshot, Signature

UseRates = NDArray[np.float32]
"""Expected uses per decode token, ``[num_layers, num_experts]``; each at most 1, each layer sums to top-k at most."""


@dataclass(frozen=True, kw_only=True)
class RoutingWeights:
    """Constants of the score; all times in seconds."""

    migrate_gain_s: float = 0.5
    """A session moves only when that is predicted to save more than this."""
    typical_output_tokens: int = 128
    """Output length assumed where a turn may be longer."""
    default_link_bytes_per_s: float = 10e9
    """Host-to-device speed of a replica that has not measured its own."""
    resize_s: float = 0.2
    """Cost of a turn that meets a resize."""
    tie_s: float = 0.001
    """Differences below this are decided by the session's hash."""


@dataclass(frozen=True, kw_only=True)
class ReplicaFigures:
    """The part of a fresh snapshot that scoring needs, derived once per refresh."""

    cap: int
    top_k: int
    expert_bytes: int
    link_bytes_per_s: float
    prefill_s_per_token: float
    block_tokens: int
    kv_blocks: int
    free_blocks: int
    max_num_seqs: int
    turns: int
    is_resizing: bool
    mean_turn_s: float


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica as a router sees it. ``figures`` is None when its telemetry is missing or stale."""

    replica_id: str
    is_healthy: bool = True
    figures: ReplicaFigures | None = None
    use_rates: UseRates | None = None
    """Summed over the sessions that run there."""


@dataclass(frozen=True, kw_only=True)
class RoutingRequest:
    """One turn to place."""

    session_key: str
    prompt_tokens: int = 0
    max_tokens: int = 0
    home: str | None = None
    """Where the session lives."""
    prefix_tokens: int = 0
    """Prompt tokens whose KV should still be at ``home``."""
    use_rates: UseRates | None = None
    """The session's, else its user's or tenant's; None: unknown."""
    pin: str | None = None
    """Use this replica if it exists at all."""
    excluded: frozenset[str] = frozenset()
    """Replicas that just failed this turn."""


@dataclass(frozen=True)
class Score:
    """Predicted seconds of a turn on one replica, by cause."""

    experts_s: float = 0.0
    recompute_s: float = 0.0
    queue_s: float = 0.0
    headroom_s: float = 0.0
    resize_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum, seconds."""
        return self.experts_s + self.recompute_s + self.queue_s + self.headroom_s + self.resize_s

    def __str__(self) -> str:
        return (
            f"{self.total_s:.3f} s (experts {self.experts_s:.3f}, recompute {self.recompute_s:.3f}, "
            f"queue {self.queue_s:.3f}, headroom {self.headroom_s:.3f}, resize {self.resize_s:.3f})"
        )


@dataclass(frozen=True, kw_only=True)
class RoutingDecision:
    """Every replica in order of preference, and why the first is first."""

    ranking: tuple[str, ...]
    reason: str
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def chosen(self) -> str:
        """The first of the ranking."""
        return self.ranking[0]


def use_rates(signature: Signature, weights: NDArray[np.float32], top_k: int) -> UseRates:
    """Scale a signature's unpacked ``weights`` ``[L, E]`` to expected uses per decode token."""
    per_layer = float(top_k)
    if signature.decode_tokens > 0 and signature.num_layers > 0:
        per_layer = min(per_layer, signature.lookups / (signature.decode_tokens * signature.num_layers))
    sums = weights.sum(axis=1, keepdims=True)
    rates = np.divide(weights * np.float32(per_layer), sums, out=np.zeros_like(weights), where=sums > 0)
    capped: UseRates = np.minimum(rates, np.float32(1.0))
    return capped


def view_replica(
    replica_id: str,
    snapshot: ReplicaSnapshot | None,
    rates: UseRates | None,
    *,
    own_turns: int,
    mean_turn_s: float,
    now_s: float,
    stale_after_s: float,
    weights: RoutingWeights,
) -> ReplicaView:
    """What a router knows of one replica at ``now_s``.

    Args:
        replica_id: The replica.
        snapshot: Its last snapshot; a stale one counts as missing.
        rates: Mean use rates of the sessions that run there, per turn.
        own_turns: Turns that this router has sent there and that have not ended; newer than the snapshot.
        mean_turn_s: Mean duration of recent turns, seconds.
        now_s: Unix time.
        stale_after_s: Age at which a snapshot is stale, seconds.
        weights: Constants of the score.
    """
    if snapshot is None or snapshot.is_stale(now_s, stale_after_s):
        return ReplicaView(replica_id=replica_id)
    layout, prefill, kv = snapshot.layout, snapshot.prefill, snapshot.kv
    turns = max(kv.running_turns + kv.waiting_turns, own_turns)
    figures = ReplicaFigures(
        cap=snapshot.split.cap,
        top_k=layout.top_k,
        expert_bytes=layout.expert_bytes,
        link_bytes_per_s=snapshot.link_bytes_per_s or weights.default_link_bytes_per_s,
        prefill_s_per_token=prefill.seconds / prefill.tokens if prefill.tokens else 0.0,
        block_tokens=layout.block_tokens,
        kv_blocks=snapshot.split.kv_blocks,
        free_blocks=max(0, snapshot.split.kv_blocks - kv.used_blocks),
        max_num_seqs=layout.max_num_seqs,
        turns=turns,
        is_resizing=snapshot.is_resizing,
        mean_turn_s=mean_turn_s,
    )
    summed = None if rates is None else rates * np.float32(turns)
    return ReplicaView(replica_id=replica_id, is_healthy=snapshot.is_healthy, figures=figures, use_rates=summed)
