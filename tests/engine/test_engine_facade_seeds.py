"""A request's own seed under chunked prefill on CPU, of which plain vLLM 0.32.0 dies."""

from __future__ import annotations

from pathlib import Path

from engine_fixtures import ENGINE_ARGS, PROMPTS, SAMPLING, answers

from wisp_core.engine.offline import OfflineEngine


def test_chunks_do_not_spend_the_seed(tiny_model: Path) -> None:
    found = []
    for max_num_batched_tokens in (2048, 96):
        arguments = {**ENGINE_ARGS, "max_num_batched_tokens": max_num_batched_tokens, "num_gpu_blocks_override": 200}
        engine = OfflineEngine(str(tiny_model), arguments)
        found.append([tokens for tokens, _ in answers(engine.generate(PROMPTS, SAMPLING))])
        engine.shutdown()
    assert found[0] == found[1]
