"""The offline choice: one split for a model, a card, a budget and a workload, and what every other would do.

Offline there is no need to predict from one split what another would do: the workload is simulated at every feasible
split, on an engine that costs what this one will, and the one where its turns are fastest is taken. What a replica
reports there goes through the cost model of the online policy, which explains the choice and its neighbours. κ_min is
that of the declared concurrency, each turn as long as a stated quantile of the workload's turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2

import numpy as np

from wisp_core.allocation.cost_model import CostModel, missing_evidence
from wisp_core.allocation.solver import Solution, feasible_splits, marginals
from wisp_core.contracts import KvDemand, MemoryLayout, ReplicaSnapshot, Split, blocks_of
from wisp_core.errors import ConfigurationError
from wisp_core.planner.cards import Card
from wisp_core.planner.chunk import CHUNKS, ChunkChoice, choose_chunk
from wisp_core.planner.estimate import (
    EngineChoice,
    Estimate,
    decode_estimate,
    engine_model,
    fetch_estimate,
    first_token_estimate,
    memory_layout,
    other_bytes,
)
from wisp_core.planner.fit import Fitting
from wisp_core.planner.model_shape import ModelShape
from wisp_core.settings import EngineSettings
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.expert_curves import ExpertCurves, RoutingModel, replay_curves
from wisp_core.simulator.simulation import simulate
from wisp_core.simulator.trace import Trace, TraceTurn

PRIOR_CURVE_ERROR = 0.15
"""Doubt in misses where the routing is assumed, not measured."""
MEASURED_CURVE_ERROR = 0.05
MAX_TURNS = 1500
"""Of a trace, that are simulated."""
_NEIGHBOURS = 3


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for."""

    shape: ModelShape
    card: Card
    budget_bytes: int
    """Everything that the engine may hold on the card."""
    concurrency: int
    """Turns that run at once."""
    max_model_len: int
    trace: Trace | None = None
    curves: ExpertCurves | None = None
    """Measured ones, as from a recording."""
    length_quantile: float = 0.9
    """The declared turns are as long as this quantile of the workload's."""
    block_size: int = 16
    settings: EngineSettings = field(default_factory=EngineSettings)
    chunk_tokens: int | None = None
    """Tokens of a pass; None: `choose_pass` decides."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One split and what it is predicted to do."""

    split: Split
    cost: float
    """Engine seconds per second, by the cost model."""
    mean_turn_s: float
    """Mean latency of a turn of the workload, simulated."""
    decode_one: Estimate
    """A decode step of one turn."""
    decode_all: Estimate
    """A decode step of all declared turns."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choice with its reasons."""

    request: PlanRequest
    choice: EngineChoice
    other_bytes: int
    pooled_bytes: int
    layout: MemoryLayout
    floor_blocks: int
    solution: Solution
    options: tuple[Option, ...]
    """The choice and its neighbours, ascending in cap."""
    curve: tuple[tuple[Split, float, float], ...]
    """Every feasible split with the engine seconds per second that experts and KV cost there, ascending in cap."""
    first_tokens: tuple[tuple[int, Estimate], ...]
    """Time to first token by prompt length."""
    fetch: tuple[int, Estimate]
    """The longest of them, and how soon the KV of as many tokens is back from host memory."""
    model: EngineModel = field(repr=False)
    workload: str

    @property
    def split(self) -> Split:
        """The chosen split."""
        return self.solution.split

    @property
    def chosen(self) -> Option:
        """What the choice is predicted to do."""
        return next(option for option in self.options if option.split == self.split)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.split.kv_blocks * self.layout.block_tokens

    @property
    def is_whole(self) -> bool:
        """Whether every expert has a slot, so that paging only costs."""
        return self.split.cap == self.layout.num_experts


def choose_pass(request: PlanRequest) -> ChunkChoice:
    """Tokens of a prefill pass for an engine of this kind. Raises ConfigurationError when none fits."""
    return _choose_pass(request, _workload(request), _curves(request))


def make_plan(request: PlanRequest) -> Plan:
    """The best split. Raises ConfigurationError that says what would make it fit."""
    trace, curves = _workload(request), _curves(request)
    try:
        tokens = _choose_pass(request, trace, curves).chosen.tokens
    except ConfigurationError:  # which the smallest pass then says in full
        tokens = request.chunk_tokens or CHUNKS[0]
    return _plan_with(request, trace, curves, tokens)


def _curves(request: PlanRequest) -> ExpertCurves:
    """Measured ones, or those of the routing that is assumed."""
    return request.curves or replay_curves(
        RoutingModel(layers=request.shape.num_moe_layers, experts=request.shape.num_experts, top_k=request.shape.top_k),
        max_batch=max(8, 2 ** ceil(log2(request.concurrency))),
    )


def _choose_pass(request: PlanRequest, trace: Trace, curves: ExpertCurves) -> ChunkChoice:
    return choose_chunk(
        request.shape,
        request.card,
        curves,
        trace,
        budget_bytes=request.budget_bytes,
        concurrency=request.concurrency,
        max_model_len=request.max_model_len,
        floor_blocks=_floor_blocks(request, trace),
        block_size=request.block_size,
        settings=request.settings,
        chunks=CHUNKS if request.chunk_tokens is None else (request.chunk_tokens,),
    )


def default_workload(concurrency: int, max_model_len: int) -> Trace:
    """Agents whose contexts grow from a sixteenth of the model's to half of it, with two seconds between turns."""
    turns, step = [], max(2, max_model_len // 16)
    output = min(128, step // 2)
    for client in range(concurrency):
        for session in range(8):
            context = step + (client * step) // max(1, concurrency)
            for turn in range(7):
                prefix = 0 if turn == 0 else context
                context = context if turn == 0 else context + step - output
                number = client * 8 + session
                turns.append(TraceTurn(client, number, client, 0, client % 8, 0, 0.0, 2.0, context, prefix, output))
                context += output
    return Trace.of(turns, source="contexts that grow from a sixteenth to half of max_model_len")


def _workload(request: PlanRequest) -> Trace:
    if request.trace is None:
        return default_workload(request.concurrency, request.max_model_len).cut(request.max_model_len)
    trace = request.trace.cut(request.max_model_len)
    if len(trace) <= MAX_TURNS:
        return trace
    # Whole clients, so that sessions stay whole.
    clients = np.unique(trace.turns["client"])
    share = ceil(len(clients) * MAX_TURNS / len(trace))
    keep = np.isin(trace.turns["client"], clients[np.linspace(0, len(clients) - 1, share).astype(int)])
    return Trace(trace.turns[keep], trace.tenants, trace.phases, trace.has_barriers, trace.source)


def _plan_with(request: PlanRequest, trace: Trace, curves: ExpertCurves, chunk_tokens: int) -> Plan:
    choice = EngineChoice(
        max_model_len=request.max_model_len,
        max_num_seqs=request.concurrency,
        max_num_batched_tokens=min(chunk_tokens, max(request.max_model_len, 256)),
        block_size=request.block_size,
        settings=request.settings,
    )
    outside = other_bytes(request.shape, choice)
    pooled_bytes = request.budget_bytes - outside
    try:
        layout = memory_layout(request.shape, choice, pooled_bytes=pooled_bytes, page_bytes=request.card.page_bytes)
    except ConfigurationError as error:
        raise ConfigurationError(_what_would_fit(request, choice, outside)) from error
    model = engine_model(request.shape, request.card, choice, curves, layout=layout, pooled_bytes=pooled_bytes)
    floor = _floor_blocks(request, trace)
    snapshot, solution = _solve(model, trace, floor)
    if solution is None:
        raise ConfigurationError(_what_would_fit(request, choice, outside, floor_blocks=floor))
    costs = CostModel.from_snapshot(snapshot)
    first_tokens = _first_tokens(request, model, solution.split.cap)
    longest = first_tokens[-1][0]
    return Plan(
        request=request,
        choice=choice,
        other_bytes=outside,
        pooled_bytes=pooled_bytes,
        layout=layout,
        floor_blocks=floor,
        solution=solution,
        options=_options(request, model, trace, snapshot, solution.split),
        curve=tuple(_terms(costs, split) for split in feasible_splits(snapshot)),
        first_tokens=first_tokens,
        fetch=(longest, fetch_estimate(layout, request.card, tokens=longest)),
        model=model,
        workload=f"{trace.source}: {len(trace)} turns",
    )


def _solve(model: EngineModel, trace: Trace, floor: int) -> tuple[ReplicaSnapshot, Solution | None]:
    """The split at which the workload's turns are fastest, and what a replica reports there."""
    fitting = Fitting(model, trace)
    start = _with_floor(fitting.report(model.half_split()), floor)
    feasible = feasible_splits(start)
    if not feasible:
        return start, None
    best = fitting.search(feasible)
    snapshot = _with_floor(fitting.report(best), floor)
    lacking = missing_evidence(snapshot)
    if lacking is not None:
        raise ConfigurationError(f"the workload is too short to plan for: {lacking}")
    cost = CostModel.from_snapshot(snapshot).cost
    return snapshot, Solution(best, cost(best), marginals(snapshot.layout, best, cost))


def _with_floor(snapshot: ReplicaSnapshot, floor: int) -> ReplicaSnapshot:
    kv: KvDemand = snapshot.kv.model_copy(update={"floor_blocks": floor})
    return snapshot.model_copy(update={"kv": kv})


def _floor_blocks(request: PlanRequest, trace: Trace) -> int:
    """κ_min of a plan: one longest request, or as many turns as run at once, whichever is more."""
    lengths = trace.turns["prompt_tokens"] + trace.turns["output_tokens"]
    tokens = int(np.quantile(lengths, request.length_quantile))
    longest_blocks = blocks_of(request.max_model_len, request.block_size)
    return max(longest_blocks, request.concurrency * blocks_of(tokens, request.block_size))


def _terms(costs: CostModel, split: Split) -> tuple[Split, float, float]:
    """What misses cost there, and everything else: mostly prefills that a larger KV pool would save."""
    terms = costs.terms(split)
    return split, terms.decode_link_s + terms.decode_compute_s, terms.prefill_link_s + terms.prefill_compute_s


def _options(
    request: PlanRequest, model: EngineModel, trace: Trace, snapshot: ReplicaSnapshot, chosen: Split
) -> tuple[Option, ...]:
    feasible = feasible_splits(snapshot)
    at = feasible.index(chosen)
    step = max(1, len(feasible) // 12)
    places = {at} | {at + offset * step for offset in range(-_NEIGHBOURS, _NEIGHBOURS + 1)} | {at - 1, at + 1}
    costs = CostModel.from_snapshot(snapshot)
    curve_error = PRIOR_CURVE_ERROR if request.curves is None else MEASURED_CURVE_ERROR
    topics = min(request.concurrency, trace.num_topics)

    def step_of(cap: int, batch: int) -> Estimate:
        return decode_estimate(
            model, request.card, cap=cap, batch=batch, topics=min(batch, topics), curve_error=curve_error
        )

    return tuple(
        Option(
            split=split,
            cost=costs.cost(split),
            mean_turn_s=simulate(trace, model, split=split).mean_turn_s,
            decode_one=step_of(split.cap, 1),
            decode_all=step_of(split.cap, request.concurrency),
        )
        for split in (feasible[place] for place in sorted(places) if 0 <= place < len(feasible))
    )


def _first_tokens(request: PlanRequest, model: EngineModel, cap: int) -> tuple[tuple[int, Estimate], ...]:
    lengths: Sequence[int] = sorted({min(tokens, request.max_model_len - 1) for tokens in (128, 2000, 8000)})
    return tuple(
        (tokens, first_token_estimate(model, request.card, cap=cap, prompt_tokens=tokens)) for tokens in lengths
    )


def _what_would_fit(
    request: PlanRequest, choice: EngineChoice, outside: int, *, floor_blocks: int | None = None
) -> str:
    """The numbers, and the settings that would fit, one at a time."""
    shape, page_bytes = request.shape, request.card.page_bytes
    large = memory_layout(shape, choice, pooled_bytes=1 << 50, page_bytes=page_bytes)
    blocks = max(floor_blocks or 0, blocks_of(request.max_model_len, choice.block_size))
    experts_bytes, kv_bytes = large.experts_bytes_by_cap[large.min_cap], large.kv_bytes(blocks)
    needed = outside + experts_bytes + kv_bytes
    room_bytes = request.budget_bytes - outside - experts_bytes
    is_too_small = request.card.memory_bytes < needed
    lines = [
        f"{shape.name} does not fit {request.budget_bytes / 1e9:.1f} GB: {shape.dense_bytes / 1e9:.2f} GB weights, "
        f"{(outside - shape.dense_bytes) / 1e9:.2f} GB activations, staging and context, {experts_bytes / 1e9:.2f} GB "
        f"experts at the smallest cap ({large.min_cap}), {kv_bytes / 1e9:.2f} GB KV for {blocks} blocks (κ_min)",
        f"it fits with --vram-budget-gb {np.ceil(needed / 1e8) / 10:.1f}"
        + (f" ({request.card.name} has only {request.card.memory_bytes / 1e9:.1f} GB)" if is_too_small else ""),
    ]
    tokens = large.kv_blocks_within(room_bytes) * choice.block_size
    fewer = request.concurrency * tokens // (blocks * choice.block_size)
    if tokens >= request.max_model_len and fewer >= 1:
        lines.append(f"or with --concurrency {fewer}")
    # Turns are as long as the context allows, so that the floor falls with it.
    shorter = request.max_model_len * tokens // (blocks * choice.block_size) // 1024 * 1024
    if shorter >= 1024:
        lines.append(f"or with --max-model-len {shorter}")
    return "; ".join(lines)
