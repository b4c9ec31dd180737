"""What a routing decision is made from, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import ReplicaSnapshot
from wisp_core.working_set.predictor import sampled_layers
from wisp_core.working_set.signature import UseRates


@dataclass(frozen=True, kw_only=True)
class RoutingWeights:
    """Constants of the score; all times in seconds."""

    migrate_gain_s: float = 0.5
    """A session moves only when that is predicted to save more than this,"""
    migrate_gain_fraction: float = 0.1
    """and more than this part of what staying costs."""
    typical_output_tokens: int = 128
    """Output length assumed where a turn may be longer, or does not say."""
    default_link_bytes_per_s: float = 10e9
    """Host-to-device speed of a replica that has not measured its own."""
    default_row_s: float = 0.001
    """Compute of one decode token while no replica has measured it."""
    fixed_rows: float = 6.0
    """Fixed part of a decode step, in rows' worth of compute, while it is not measured; 5.5 on an H200."""
    resize_s: float = 0.2
    """Cost of a turn that meets a resize."""
    tie_s: float = 0.001
    """Differences below this are decided by the session's hash."""
    num_scored: int = 6
    """Replicas that are scored exactly, the home apart."""
    stale_after_s: float = 10.0
    """Age at which a replica's figures count as missing."""


@dataclass(frozen=True, kw_only=True)
class ReplicaFigures:
    """The part of a snapshot that scoring needs, as numbers, so that a fleet is a table. NaN: not measured."""

    at_s: float
    is_healthy: float
    is_draining: float
    is_resizing: float
    cap: float
    copy_s: float
    """Seconds to copy one expert of one layer."""
    fixed_s: float
    """Compute of a decode step, apart from its rows."""
    row_s: float
    """Compute of one row of a decode step."""
    pass_s: float
    """Copies of a mean prefill pass, and what else of it is not compute of its tokens."""
    pass_tokens: float
    """Mean tokens of one prefill pass,"""
    max_pass_tokens: float
    """and the most."""
    use_share: float
    """Part of a layer's experts that one token uses."""
    prompt_token_s: float
    """Compute of one prompt token."""
    prefill_share: float
    """Part of the time that prefills take, in which decoding stands still."""
    block_tokens: float
    kv_blocks: float
    free_blocks: float
    """Blocks that no running turn holds; they may still hold a reusable prefix."""
    cached_blocks: float
    """Those that do."""
    max_num_seqs: float
    turns: float
    """Running or waiting now."""
    waiting_turns: float
    mean_turns: float
    """Mean of running and waiting turns over ``window_s``."""
    window_s: float


@dataclass(frozen=True, kw_only=True)
class RoutingRequest:
    """One turn to place."""

    session_key: str
    prompt_tokens: int = 0
    max_tokens: int = 0
    """0: not said."""
    home: str | None = None
    """Where the session lives."""
    prefix_tokens: int = 0
    """Prompt tokens whose KV should still be at ``home``."""
    uses: Uses | None = None
    """The session's working set, else a predicted one; None: unknown."""
    mean_turn_s: float = 1.0
    """Mean duration of recent turns of the service."""
    excluded: frozenset[str] = frozenset()
    """Replicas that just failed this turn."""


@dataclass(frozen=True)
class Score:
    """Predicted seconds by cause: what the turn takes on one replica, and what it delays the turns there."""

    experts_s: float = 0.0
    """Copies of missed experts."""
    decode_s: float = 0.0
    """Compute, shared with the turns there."""
    recompute_s: float = 0.0
    """Prefill of what is not in the prefix cache."""
    queue_s: float = 0.0
    headroom_s: float = 0.0
    """Wait for KV blocks."""
    resize_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum, seconds."""
        return self.experts_s + self.decode_s + self.recompute_s + self.queue_s + self.headroom_s + self.resize_s

    def __str__(self) -> str:
        return (
            f"{self.total_s:.3f} s (experts {self.experts_s:.3f}, decode {self.decode_s:.3f}, "
            f"recompute {self.recompute_s:.3f}, queue {self.queue_s:.3f}, headroom {self.headroom_s:.3f}, "
            f"resize {self.resize_s:.3f})"
        )


@dataclass(frozen=True, kw_only=True)
class RoutingDecision:
    """The best replicas in order of preference, and why the first is first."""

    ranking: tuple[str, ...]
    """At least one; those that are not in it come after it, in any order."""
    reason: str
    scores: dict[str, Score] = field(default_factory=dict)
    is_for_this_turn_only: bool = False
    """The session's home cannot take this turn but stays its home."""

    @property
    def chosen(self) -> str:
        """The first of the ranking."""
        return self.ranking[0]


MAX_SAMPLED_LAYERS = 8
"""Layers that are looked at; the others are taken to be like them."""
SKETCH_USES = 32
"""Heaviest (layer, expert) uses of a working set that the shortlist looks at."""


@dataclass(frozen=True, eq=False)
class Uses:
    """A working set as routing reads it."""

    rates: UseRates
    """Of the sampled layers, [S, E]."""
    scale: float
    """Layers that each sampled one stands for."""

    @classmethod
    def of(cls, rates: UseRates, max_layers: int = MAX_SAMPLED_LAYERS) -> Uses:
        """Sample the layers of ``rates`` [L, E]."""
        layers = sampled_layers(rates.shape[0], max_layers)
        return cls(np.ascontiguousarray(rates[layers]), rates.shape[0] / len(layers))

    @cached_property
    def sketch(self) -> tuple[npt.NDArray[np.intp], UseRates]:
        """Flat positions of the heaviest uses, as many in each sampled layer, and their rates scaled to all uses."""
        num_layers, num_experts = self.rates.shape
        count = min(num_experts, max(1, SKETCH_USES // num_layers))
        experts = np.argpartition(-self.rates, count - 1, axis=1)[:, :count]
        heaviest = np.take_along_axis(self.rates, experts, axis=1)
        kept, total = heaviest.sum(axis=1, keepdims=True), self.rates.sum(axis=1, keepdims=True)
        scaled = np.divide(heaviest * total, kept, out=np.zeros_like(heaviest), where=kept > 0)
        positions = (np.arange(num_layers)[:, None] * num_experts + experts).reshape(-1)
        return positions, scaled.reshape(-1) * np.float32(self.scale)


def figures_of(snapshot: ReplicaSnapshot, weights: RoutingWeights) -> ReplicaFigures:
    """What scoring reads from a snapshot."""
    layout, prefill, kv = snapshot.layout, snapshot.prefill, snapshot.kv
    fixed_s, row_s = _step_seconds(snapshot, weights)
    nan = float("nan")
    link_bytes_per_s = snapshot.link_bytes_per_s or weights.default_link_bytes_per_s
    has_prefilled = prefill.steps > 0 and prefill.tokens > 0
    pass_s, prompt_token_s = _pass_seconds(snapshot) if has_prefilled else (nan, nan)
    return ReplicaFigures(
        at_s=snapshot.at_s,
        is_healthy=snapshot.is_healthy,
        is_draining=snapshot.is_draining,
        is_resizing=snapshot.is_resizing,
        cap=min(max(snapshot.split.cap, 1), layout.num_experts),
        copy_s=layout.expert_bytes / link_bytes_per_s,
        fixed_s=fixed_s,
        row_s=row_s,
        pass_s=pass_s,
        pass_tokens=prefill.tokens / prefill.steps if has_prefilled else nan,
        max_pass_tokens=layout.max_pass_tokens,
        use_share=layout.top_k / layout.num_experts,
        prompt_token_s=prompt_token_s,
        prefill_share=_prefill_share(snapshot),
        block_tokens=layout.block_tokens,
        kv_blocks=snapshot.split.kv_blocks,
        free_blocks=max(0, snapshot.split.kv_blocks - kv.used_blocks),
        cached_blocks=kv.cached_blocks,
        max_num_seqs=layout.max_num_seqs,
        turns=kv.running_turns + kv.waiting_turns,
        waiting_turns=kv.waiting_turns,
        mean_turns=kv.mean_turns,
        window_s=snapshot.window_s,
    )


def _step_seconds(snapshot: ReplicaSnapshot, weights: RoutingWeights) -> tuple[float, float]:
    """Compute of a decode step: its fixed part and that of each row."""
    decode, fit = snapshot.decode, snapshot.fit
    if fit.num_samples > 0:
        return fit.step_s, fit.token_s
    if decode.steps == 0 or decode.tokens == 0:
        return float("nan"), float("nan")
    step_s = max(0.0, decode.seconds - decode.link_seconds) / decode.steps
    row_s = step_s / (weights.fixed_rows + decode.tokens / decode.steps)
    return weights.fixed_rows * row_s, row_s


def _pass_seconds(snapshot: ReplicaSnapshot) -> tuple[float, float]:
    """A prefill pass: the part that does not depend on its length, and that of each token."""
    prefill, fit = snapshot.prefill, snapshot.fit
    copies_s = prefill.link_seconds / prefill.steps
    if fit.num_samples > 0:
        return copies_s + fit.pass_s, fit.prompt_token_s
    return copies_s, max(0.0, prefill.seconds - prefill.link_seconds) / prefill.tokens


def _prefill_share(snapshot: ReplicaSnapshot) -> float:
    prefill = snapshot.prefill
    if prefill.steps == 0:
        return 0.0
    return min(0.8, snapshot.prefill_steps_per_s * prefill.seconds / prefill.steps)
