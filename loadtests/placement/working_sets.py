"""How well a session's working set is foretold on a real engine, whether the safe size is safe, and what it costs.

Sessions of planted topics on one engine on this machine's CPU. A session's answer is foretold from what is known before
it: nothing, its tenant's sessions, those with its system prompt, its own prefill, its own first tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.rows import Row
from services.environment import engine_environment, set_in_this_process
from wisp_core.contracts import Signature
from wisp_core.settings import WispSettings
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model
from wisp_core.tiny_model.tiny_tokenizer import first_word_id
from wisp_core.working_set.predictor import Evidence, predict, prefill_worth, safe_cap
from wisp_core.working_set.signature import UseRates, merge, use_rates

MODEL = TinyModelConfig(experts=64, top_k=4, moe_intermediate=128, kv_heads=1)
STAGES = ("nothing", "tenant", "prompt", "prefill", "first_tokens")


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """Sessions and engine."""

    name: str = "working-sets"
    known_sessions: int = 2
    """Of each topic, whose signatures are there before the ones that are foretold."""
    new_sessions: int = 2
    """Of each topic."""
    prompt_tokens: int = 64
    first_tokens: int = 32
    answer_tokens: int = 192
    safe_miss_share: float = 0.1
    cost_batches: tuple[int, ...] = (1, 8)
    """Sessions that decode together where the cost of counting is measured."""
    vram_budget_bytes: int = 60_000_000
    activation_bytes: int = 8 << 20
    seed: int = 0


def measure(config: PredictionConfig, directory: Path, say: Callable[[str], None]) -> list[Row]:
    """A row for each stage, topic and batch."""
    write_tiny_model(directory, MODEL)
    set_in_this_process(
        engine_environment(is_cpu=True, is_local_model=True, extra={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    )
    # Here, not at the top: vLLM takes seconds, and reads its environment when it is imported.
    from wisp_core.engine.offline import OfflineEngine

    settings = WispSettings(vram_budget_bytes=config.vram_budget_bytes, activation_bytes=config.activation_bytes)
    arguments = {"max_model_len": 512, "block_size": 32, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    engine = OfflineEngine(str(directory), arguments, settings)
    try:
        say("known sessions")
        known = _decode(config, engine, range(config.known_sessions), "known", config.answer_tokens)
        say("new sessions")
        rows = _foretold(config, engine, known)
        say("safe sizes")
        rows += _safe_sizes(config, engine, known)
        say("cost")
        return rows + [_cost(config, engine, batch) for batch in config.cost_batches]
    finally:
        engine.shutdown()


def summarize(rows: Sequence[Row]) -> Row:
    """Mean error by stage, worst miss share at the safe size, and the share of a decode step that counting takes."""
    summary: Row = {}
    for stage in STAGES:
        summary[f"error_{stage}"] = round(float(np.mean([r["error"] for r in rows if r.get("stage") == stage])), 4)
    safe = [row for row in rows if row["kind"] == "safe_size"]
    costs = [row for row in rows if row["kind"] == "cost"]
    return summary | {
        "safe_miss_share_mean": round(float(np.mean([row["miss_share"] for row in safe])), 4),
        "safe_miss_share_max": round(max(row["miss_share"] for row in safe), 4),
        "signature_share_of_step": max(row["share_of_step"] for row in costs),
    }


def _decode(
    config: PredictionConfig, engine: Any, numbers: Sequence[int], name: str, tokens: int
) -> dict[str, Signature]:
    """Signatures of sessions ``name`` of every topic, which decode so many tokens; of nobody else."""
    from wisp_core.engine.offline import SamplingParams

    prompts, sampling = [], []
    for topic in range(MODEL.topics):
        for number in numbers:
            prompts.append({"prompt_token_ids": _prompt(config, topic, number)})
            sampling.append(
                SamplingParams(
                    max_tokens=tokens + 1,
                    temperature=1.0,
                    seed=config.seed + number,
                    ignore_eos=True,
                    extra_args={"wisp_session": f"tenant/{name}/{topic}-{number}"},
                )
            )
    engine.generate(prompts, sampling)
    return {one.key.rpartition("/")[2]: one for one in engine.signatures() if one.key.count("/") == 2}


def _prompt(config: PredictionConfig, topic: int, number: int) -> list[int]:
    """The same start for all sessions of a topic, as a system prompt, and words of their own."""
    first, words = first_word_id() + topic * MODEL.words_per_topic, MODEL.words_per_topic
    half = config.prompt_tokens // 2
    own = [first + (number * 31 + place * 7) % words for place in range(config.prompt_tokens - half)]
    return [first + place % words for place in range(half)] + own


def _foretold(config: PredictionConfig, engine: Any, known: dict[str, Signature]) -> list[Row]:
    """Error of each stage: the share of the answer's uses that was expected elsewhere."""
    numbers = range(config.known_sessions, config.known_sessions + config.new_sessions)
    # The same prompts and seeds: the first tokens are those of the whole answer.
    begun = _decode(config, engine, numbers, "begun", config.first_tokens)
    whole = _decode(config, engine, numbers, "whole", config.answer_tokens)
    tenant = merge("tenant", known.values())
    rows = []
    for key, answer in whole.items():
        topic = key.partition("-")[0]
        prompt = merge("prompt", [one for name, one in known.items() if name.partition("-")[0] == topic])
        prefill = use_rates(begun[key], MODEL.top_k, is_prefill=True)
        steps = [
            Evidence(_uniform(), 0.0),
            Evidence(_rates(tenant), tenant.decode_tokens),
            Evidence(_rates(prompt), prompt.decode_tokens),
            Evidence(prefill, prefill_worth(begun[key].prefill_tokens)),
            Evidence(_rates(begun[key]), begun[key].decode_tokens),
        ]
        for count, stage in enumerate(STAGES, start=1):
            expected = predict(steps[:count])
            assert expected is not None, "there is evidence"
            rows.append({"kind": "foretold", "stage": stage, "session": key, "error": _error(expected, answer)})
    return rows


def _safe_sizes(config: PredictionConfig, engine: Any, known: dict[str, Signature]) -> list[Row]:
    """What a new session of each topic, alone, misses at the cap that its topic's sessions say is safe."""
    from wisp_core.contracts import Split
    from wisp_core.engine.offline import SamplingParams

    rows = []
    for topic in range(MODEL.topics):
        prompt = merge("prompt", [one for name, one in known.items() if name.partition("-")[0] == str(topic)])
        cap = safe_cap(_rates(prompt), config.safe_miss_share, engine.facts.layout.min_cap)
        engine.resize(engine.plan(Split(cap=cap, kv_blocks=64)))
        number = config.known_sessions + config.new_sessions
        prompts = [{"prompt_token_ids": _prompt(config, topic, number)}]

        def sampling(tokens: int, seed: int) -> list[Any]:
            return [SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True)]

        engine.generate(prompts, sampling(config.first_tokens, 0))  # the slots hold another topic's experts
        before = engine.snapshot()
        engine.generate(prompts, sampling(config.answer_tokens, 1))
        after = engine.snapshot()
        missed, distinct = (getattr(after.decode, n) - getattr(before.decode, n) for n in ("misses", "distinct"))
        rows.append({"kind": "safe_size", "topic": topic, "cap": after.split.cap, "miss_share": missed / distinct})
    return rows


class _Timed:
    """A tally whose time is taken."""

    def __init__(self, tally: Any) -> None:
        self._tally = tally
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._tally, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began_s

        return timed


def _cost(config: PredictionConfig, engine: Any, batch: int) -> Row:
    """Time of counting, signatures made once at the end, in the steps of sessions that decode together."""
    from wisp_core.engine.offline import SamplingParams

    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    tally = worker._wisp_tally
    timed = worker._wisp_tally = worker._wisp_pager.observer = _Timed(tally)
    prompts = [{"prompt_token_ids": _prompt(config, number % MODEL.topics, number)} for number in range(batch)]
    sampling = [
        SamplingParams(
            max_tokens=config.answer_tokens,
            temperature=1.0,
            seed=number,
            ignore_eos=True,
            extra_args={"wisp_session": f"tenant/cost/{number}"},
        )
        for number in range(batch)
    ]
    try:
        before = engine.snapshot()
        engine.generate(prompts, sampling)
        engine.signatures()
        after = engine.snapshot()
    finally:
        worker._wisp_tally = worker._wisp_pager.observer = tally
    seconds = after.decode.seconds - before.decode.seconds + after.prefill.seconds - before.prefill.seconds
    steps = after.decode.steps - before.decode.steps + after.prefill.steps - before.prefill.steps
    return {
        "kind": "cost",
        "batch": batch,
        "steps": steps,
        "step_ms": 1000 * seconds / steps,
        "counting_us": 1e6 * timed.seconds / steps,
        "share_of_step": round(timed.seconds / seconds, 5),
    }


def _uniform() -> UseRates:
    return np.full((MODEL.layers, MODEL.experts), MODEL.top_k / MODEL.experts, dtype=np.float32)


def _rates(signature: Signature) -> UseRates:
    return use_rates(signature, MODEL.top_k)


def _error(expected: UseRates, answer: Signature) -> float:
    """Half the sum of differences, over all uses: 0 foretells every use, 1 none."""
    seen = _rates(answer)
    return float(np.abs(expected - seen).sum() / 2 / seen.sum())
