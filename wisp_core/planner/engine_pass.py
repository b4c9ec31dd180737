"""The tokens of a pass for an engine that is about to start, from the arguments that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wisp_core.errors import ConfigurationError
from wisp_core.planner.cards import Card
from wisp_core.planner.chunk import ChunkChoice
from wisp_core.planner.model_config import read_config
from wisp_core.planner.model_shape import read_shape
from wisp_core.planner.plan import PlanRequest, choose_pass
from wisp_core.settings import WispSettings

_MOST_TURNS = 16
"""That are planned for where ``max_num_seqs`` allows more: vLLM's own default is no promise of so many."""


def choose_for_engine(model: str, engine_args: Mapping[str, Any], settings: WispSettings, card: Card) -> ChunkChoice:
    """The choice with its alternatives. Raises WispError when the model has no plan, or none fits."""
    assert settings.vram_budget_bytes is not None
    shape = read_shape(
        read_config(model),
        name=model,
        dtype=engine_args.get("dtype"),
        kv_dtype=engine_args.get("kv_cache_dtype") or "auto",
    )
    max_model_len = engine_args.get("max_model_len") or 0
    turns = min(engine_args.get("max_num_seqs") or _MOST_TURNS, _MOST_TURNS)
    while True:
        request = PlanRequest(
            shape=shape,
            card=card,
            budget_bytes=settings.vram_budget_bytes,
            concurrency=turns,
            max_model_len=max_model_len if max_model_len > 0 else shape.max_positions,
            block_size=engine_args.get("block_size") or 16,
            settings=settings,
        )
        try:
            return choose_pass(request)
        except ConfigurationError:
            if turns == 1:
                raise
            turns //= 2  # a budget in which fewer fit at once
