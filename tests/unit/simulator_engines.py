"""Small engines and traces for tests of the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from policy_snapshots import make_layout

from wisp_core.contracts import MemoryLayout
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.expert_curves import ExpertCurves, RoutingModel, replay_curves
from wisp_core.simulator.trace import Trace, TraceTurn

ROUTING = RoutingModel(layers=2, experts=8, top_k=2)


def flat_curves(misses_at_zero: float = 8.0) -> ExpertCurves:
    """``batch * misses_at_zero * (1 - cap / 8)`` misses and ``4 * batch`` distinct experts per step; no comebacks."""
    share = 1.0 - np.arange(9) / 8
    misses = np.array([[batch * misses_at_zero * share] for batch in (1, 64)])
    return ExpertCurves((1, 64), (1,), misses, np.array([[4.0], [256.0]]), (1,), np.zeros((1, 9)))


def make_engine(**changes: Any) -> EngineModel:
    """1 s a step, 1 s a pass and 10 ms a token of it, no copies; passes of 100 tokens; 16 tokens a block."""
    layout: MemoryLayout = changes.pop("layout", make_layout(max_model_len=512))
    fields: dict[str, Any] = {
        "name": "tiny",
        "layout": layout,
        "budget_bytes": 42 * layout.page_bytes,
        "link_bytes_per_s": 1e30,
        "curves": flat_curves(),
        "step_s": 1.0,
        "pass_s": 1.0,
        "token_s": 0.01,
        "pass_tokens": 100,
        "is_pass_overlapped": False,
        "resize_s": 0.0,
        "resize_s_per_byte": 0.0,
    }
    return EngineModel(**(fields | changes))


def replayed_engine(**changes: Any) -> EngineModel:
    """One whose misses come from replayed routing, over a link that makes them matter."""
    return make_engine(curves=replay_curves(ROUTING, max_batch=8), link_bytes_per_s=1e5, **changes)


def make_turn(client: int = 0, **changes: Any) -> TraceTurn:
    """100 prompt tokens, 11 of answer, at the start."""
    fields: dict[str, Any] = {
        "client": client,
        "session": client,
        "user": client,
        "tenant": 0,
        "topic": 0,
        "phase": 0,
        "at_s": 0.0,
        "think_s": 0.0,
        "prompt_tokens": 100,
        "prefix_tokens": 0,
        "output_tokens": 11,
    }
    return TraceTurn(**(fields | changes))


def make_trace(*turns: TraceTurn, **names: Any) -> Trace:
    """A trace of ``turns``."""
    return Trace.of(turns, **names)
