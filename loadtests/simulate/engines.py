"""Engines to simulate: a named shape on a card with a budget."""

from __future__ import annotations

from loadtests.shapes import SHAPES, config_of
from wisp_core.errors import ConfigurationError
from wisp_core.planner.cards import find_card
from wisp_core.planner.estimate import EngineChoice, engine_model, memory_layout, other_bytes
from wisp_core.planner.model_shape import read_shape
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.expert_curves import RoutingModel, replay_curves


def build_engine(
    *, shape: str, card: str, budget_gb: float, max_model_len: int, max_num_seqs: int, chunk_tokens: int
) -> tuple[EngineModel, RoutingModel]:
    """The engine and the routing that its misses come from. Raises ConfigurationError."""
    if shape not in SHAPES:
        raise ConfigurationError(f"--shape {shape}: known are {', '.join(SHAPES)}")
    sizes = read_shape(config_of(SHAPES[shape]), name=shape)
    choice = EngineChoice(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=chunk_tokens)
    profile = find_card(card)
    pooled_bytes = int(budget_gb * 1e9) - other_bytes(sizes, choice)
    try:
        layout = memory_layout(sizes, choice, pooled_bytes=pooled_bytes, page_bytes=profile.page_bytes)
    except ConfigurationError as error:
        raise ConfigurationError(f"--vram-budget-gb {budget_gb:g}: {shape}: {error}") from error
    routing = RoutingModel(layers=sizes.num_moe_layers, experts=sizes.num_experts, top_k=sizes.top_k)
    curves = replay_curves(routing, max_batch=max_num_seqs)
    return engine_model(sizes, profile, choice, curves, layout=layout, pooled_bytes=pooled_bytes), routing
