"""Turns of several topics that come at once to one engine: first come first served against the turn gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.environment import engine_environment, set_in_this_process
from wisp_core.model.tiny import TinyModelConfig, write_tiny_model
from wisp_core.model.tiny_tokenizer import first_word_id
from wisp_core.settings import WispSettings

Row = dict[str, Any]

MODEL = TinyModelConfig(experts=64, top_k=4, moe_intermediate=128, kv_heads=1)


@dataclass(frozen=True, kw_only=True)
class CoScheduleConfig:
    """One engine on this machine's CPU, its link emulated, and turns that are all there before the first step."""

    name: str = "co-schedule"
    caps: tuple[int, ...] = (20, 32)
    """Slots per layer, of 64; a topic prefers 16 experts."""
    num_sessions: int = 16
    prompt_tokens: int = 48
    output_tokens: int = 48
    rounds: int = 2
    """Of each way, in turns."""
    link_bytes_per_s: float = 25e6
    vram_budget_bytes: int = 44_000_000
    activation_bytes: int = 8 << 20
    seed: int = 0


def measure(config: CoScheduleConfig, directory: Path, say: Callable[[str], None]) -> list[Row]:
    """Rows by cap, way and round; the gate learns working sets from a round before."""
    write_tiny_model(directory, MODEL)
    set_in_this_process(
        engine_environment(is_cpu=True, is_local_model=True, extra={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    )
    rows: list[Row] = []
    for cap in config.caps:
        rows += _of_cap(config, directory, cap, say)
    return rows


def summarize(rows: Sequence[Row]) -> Row:
    """Gated over first come first served, by cap."""
    keys = ("makespan_s", "mean_turn_s", "p95_turn_s", "missed_bytes_per_token")
    summary: Row = {}
    for cap in dict.fromkeys(row["cap"] for row in rows):
        means = {
            way: {key: float(np.mean([r[key] for r in rows if (r["cap"], r["way"]) == (cap, way)])) for key in keys}
            for way in ("fcfs", "gated")
        }
        summary |= {f"cap_{cap}_{key}": round(means["gated"][key] / means["fcfs"][key], 4) for key in keys}
    return summary


def _of_cap(config: CoScheduleConfig, directory: Path, cap: int, say: Callable[[str], None]) -> list[Row]:
    # Here, not at the top: vLLM takes seconds, and reads its environment when it is imported.
    from wisp_core.engine.offline import OfflineEngine

    settings = WispSettings(
        cap=cap,
        vram_budget_bytes=config.vram_budget_bytes,
        activation_bytes=config.activation_bytes,
        emulated_link_bytes_per_s=config.link_bytes_per_s,
    )
    arguments = {"max_model_len": 512, "block_size": 32, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    engine = OfflineEngine(str(directory), arguments | {"disable_log_stats": False}, settings)
    try:
        _round(config, engine, 0)  # nobody's working set is known before
        known = engine.signatures()
        rows: list[Row] = []
        for way in ("fcfs", "gated"):
            if way == "gated":
                engine.expect(known)
            for number in range(config.rounds):
                rows.append({"cap": cap, "way": way, **_round(config, engine, 1 + len(rows))})
                say(f"cap {cap}, {way}, round {number}: {rows[-1]['makespan_s']:.1f} s")
        return rows
    finally:
        engine.shutdown()


def _round(config: CoScheduleConfig, engine: Any, number: int) -> Row:
    from wisp_core.engine.offline import SamplingParams

    prompts, sampling = [], []
    for session in range(config.num_sessions):
        first = first_word_id() + session % MODEL.topics * MODEL.words_per_topic
        words = [
            (session * 7 + place * 3 + number * 11) % MODEL.words_per_topic for place in range(config.prompt_tokens)
        ]
        prompts.append({"prompt_token_ids": [first + word for word in words]})
        sampling.append(
            SamplingParams(
                max_tokens=config.output_tokens,
                temperature=1.0,
                seed=config.seed + session + number,
                ignore_eos=True,
                extra_args={"wisp_session": f"tenant/user/{session}"},
            )
        )
    before = engine.snapshot()
    outputs = engine.generate(prompts, sampling)
    after = engine.snapshot()
    ends = np.array([output.metrics.last_token_ts - output.metrics.queued_ts for output in outputs])
    tokens = after.decode.tokens - before.decode.tokens
    return {
        "makespan_s": float(ends.max()),
        "mean_turn_s": float(ends.mean()),
        "p95_turn_s": float(np.percentile(ends, 95)),
        "missed_bytes_per_token": (after.decode.missed_bytes - before.decode.missed_bytes) / max(1, tokens),
        "decode_steps": after.decode.steps - before.decode.steps,
        "prefill_passes": after.prefill.steps - before.prefill.steps,
    }
