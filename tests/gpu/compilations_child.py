"""One engine of `test_compilations`: answers steps of many sizes, prints one JSON line of what was compiled then."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine_features_child import ARGUMENTS, HOST_BYTES, SamplingParams, write_model  # first: sets the environment
from triton import knobs

from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

LENGTHS = [*range(1, 21), 300, 511, 513, 2000]
AFTER_RESIZES = [2, 5, 129, 1027]
BATCHES = [[3] * 5, [31, 64, 7] * 5, [200, 1] * 4]
LOGPROBS = [0, 1, 2, 4, 7, 8, 15, 16, 20]

Hook = Callable[..., Any]


def watch(compiled: list[str]) -> None:
    """From here on, add the name of every kernel that Triton compiles, or loads from its files, to ``compiled``."""
    earlier: Hook | None = knobs.runtime.jit_post_compile_hook

    def note(**event: Any) -> Any:
        compiled.append(f"{getattr(event.get('fn'), 'name', '?')} {str(event.get('key'))[:300]}")
        return earlier(**event) if earlier is not None else None

    knobs.runtime.jit_post_compile_hook = note


def steps(engine: OfflineEngine) -> Iterator[str]:
    """Works through everything; says what each part was."""
    for lengths in ([length] for length in LENGTHS):
        ask(engine, lengths)
    yield "prompts"
    for lengths in BATCHES:
        ask(engine, lengths)
    yield "batches"
    for logprobs in LOGPROBS:
        ask(engine, [6, 9], logprobs=logprobs)
    yield "log-probabilities"
    layout, first = engine.facts.layout, engine.snapshot().split
    if layout.is_paged:
        for cap in (first.cap - 9, first.cap + 5, first.cap):
            left_bytes = engine.facts.budget_bytes - layout.experts_bytes_by_cap[cap]
            split = first.model_copy(update={"cap": cap, "kv_blocks": layout.kv_blocks_within(left_bytes)})
            outcome = engine.resize(engine.plan(split))
            assert outcome.outcome.value == "applied", outcome
            for lengths in ([length] for length in AFTER_RESIZES):
                ask(engine, lengths)
        yield "resizes"


def ask(engine: OfflineEngine, lengths: list[int], logprobs: int | None = None) -> None:
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 5000 for j in range(n)]} for i, n in enumerate(lengths)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=logprobs)
    engine.generate(prompts, params)


def main() -> None:
    job = json.loads(sys.argv[1])
    write_model(job["model"])
    settings = WispSettings(activation_bytes=1 << 30, host_memory_bytes=HOST_BYTES, **job["wisp"])
    started_s = time.perf_counter()
    engine = OfflineEngine(job["model"], ARGUMENTS, settings)
    result: dict[str, Any] = {"start_s": time.perf_counter() - started_s, "is_paged": engine.facts.layout.is_paged}
    compiled: list[str] = []
    watch(compiled)
    result["compiled"] = {}
    for part in steps(engine):
        result["compiled"][part] = compiled.copy()
        compiled.clear()
    engine.check_integrity()
    engine.shutdown()
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
