"""What vLLM compiles when it is first needed is compiled before the engine serves: no step waits for a compiler."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, PROMPTS
from torch._dynamo.utils import counters
from vllm import SamplingParams

from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings


def test_the_first_request_for_log_probabilities_compiles_nothing(tiny_model: Path) -> None:
    torch._dynamo.reset()
    settings = WispSettings(cap=8, vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES)
    engine = OfflineEngine(str(tiny_model), ENGINE_ARGS, settings)
    try:
        num_graphs = counters["stats"]["unique_graphs"]
        for prompts in (PROMPTS[:1], PROMPTS[:3]):
            wanted = [SamplingParams(max_tokens=2, logprobs=3, temperature=t) for t in (0.0, 1.0, 1.0)[: len(prompts)]]
            engine.generate(prompts, wanted)
        assert counters["stats"]["unique_graphs"] == num_graphs
    finally:
        engine.shutdown()
