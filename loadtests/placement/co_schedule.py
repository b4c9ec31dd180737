"""Agents of several topics on one engine: turns first come, first served, against the turn gate.

Each agent sends its next turn when the one before has ended, and one agent in some sends long prompts, whose prefill
stops everybody's decoding. Time between two tokens of a turn is measured too: its largest values are these stalls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.rows import Row
from services.environment import engine_environment, set_in_this_process
from wisp_core.settings import WispSettings
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model
from wisp_core.tiny_model.tiny_tokenizer import first_word_id

MODEL = TinyModelConfig(experts=64, top_k=4, moe_intermediate=128, kv_heads=1)
FCFS, GATED = "fcfs", "gated"
_COMPARED = ("makespan_s", "mean_turn_s", "p95_turn_s", "mean_ttft_s", "p95_ttft_s", "gap_p99_s", "gap_max_s", "copies")


@dataclass(frozen=True, kw_only=True)
class CoScheduleConfig:
    """One engine on this machine's CPU, its link emulated, and agents in a closed loop."""

    name: str = "co-schedule"
    engines: tuple[tuple[int, float], ...] = ((18, 100e6), (18, 400e6), (32, 100e6))
    """Slots per layer, of 64, where a topic prefers 16 experts; and bytes per second of the link."""
    num_agents: int = 12
    """Of eight topics in turn."""
    turns_per_agent: int = 2
    prompt_tokens: int = 48
    output_tokens: int = 32
    num_long_agents: int = 1
    """Agents whose prompts are ``long_prompt_tokens`` long."""
    long_prompt_tokens: int = 384
    vram_budget_bytes: int = 44_000_000
    activation_bytes: int = 8 << 20
    seeds: tuple[int, ...] = (0, 1)


def measure(config: CoScheduleConfig, directory: Path, say: Callable[[str], None]) -> list[Row]:
    """Rows by cap, link, way and seed; the gate learns working sets from a round before."""
    write_tiny_model(directory, MODEL)
    set_in_this_process(
        engine_environment(is_cpu=True, is_local_model=True, extra={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    )
    rows: list[Row] = []
    for cap, link_bytes_per_s in config.engines:
        rows += _of_engine(config, directory, cap, link_bytes_per_s, say)
    return rows


def summarize(rows: Sequence[Row]) -> Row:
    """Gated over first come, first served, by cap and link: ratios of means over seeds."""
    summary: Row = {}
    for cap, link in dict.fromkeys((row["cap"], row["link_bytes_per_s"]) for row in rows):
        of_engine = [row for row in rows if (row["cap"], row["link_bytes_per_s"]) == (cap, link)]
        summary[f"cap_{cap}_link_{link / 1e6:.0f}_mb_per_s"] = {
            key: round(_mean(of_engine, GATED, key) / _mean(of_engine, FCFS, key), 4) for key in _COMPARED
        }
    return summary


def _mean(rows: Sequence[Row], way: str, key: str) -> float:
    return float(np.mean([row[key] for row in rows if row["way"] == way]))


def _of_engine(
    config: CoScheduleConfig, directory: Path, cap: int, link_bytes_per_s: float, say: Callable[[str], None]
) -> list[Row]:
    # Here, not at the top: vLLM takes seconds, and reads its environment when it is imported.
    from wisp_core.engine.offline import OfflineEngine

    settings = WispSettings(
        cap=cap,
        vram_budget_bytes=config.vram_budget_bytes,
        activation_bytes=config.activation_bytes,
        emulated_link_bytes_per_s=link_bytes_per_s,
    )
    arguments = {"max_model_len": 512, "block_size": 32, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    engine = OfflineEngine(str(directory), arguments, settings)
    rows: list[Row] = []
    try:
        _Round(config, engine, seed=-1, turns_per_agent=1).play()  # nobody's working set is known before
        known = engine.signatures()
        for way in (FCFS, GATED):
            if way == GATED:
                engine.expect(known)
            for seed in config.seeds:
                figures = _Round(config, engine, seed=seed, turns_per_agent=config.turns_per_agent).play()
                rows.append({"cap": cap, "link_bytes_per_s": link_bytes_per_s, "way": way, "seed": seed, **figures})
                say(f"cap {cap}, {link_bytes_per_s / 1e6:.0f} MB/s, {way}, seed {seed}: {figures['makespan_s']:.1f} s")
        return rows
    finally:
        engine.shutdown()


@dataclass
class _Turn:
    agent: int
    number: int
    sent_s: float
    token_at_s: list[float] = field(default_factory=list)


class _Round:
    """All agents' turns, each sent when its agent's one before has ended."""

    def __init__(self, config: CoScheduleConfig, engine: Any, *, seed: int, turns_per_agent: int) -> None:
        self._config, self._engine, self._seed = config, engine, seed
        self._turns_per_agent = turns_per_agent
        self._running: dict[str, _Turn] = {}
        self._ended: list[_Turn] = []

    def play(self) -> Row:
        """Step the engine until every turn has ended."""
        before = self._engine.snapshot().decode
        began_s = time.monotonic()
        for agent in range(self._config.num_agents):
            self._send(agent, 0)
        while self._running:
            outputs = self._engine.llm.llm_engine.step()
            now_s = time.monotonic()
            for output in outputs:
                self._take(output, now_s)
        after = self._engine.snapshot().decode
        tokens = max(1, after.tokens - before.tokens)
        return {
            "makespan_s": time.monotonic() - began_s,
            **_times(self._ended),
            "copies": (after.misses - before.misses) / tokens,
            "decode_steps": after.steps - before.steps,
            "copy_share": (after.link_seconds - before.link_seconds) / (after.seconds - before.seconds),
        }

    def _send(self, agent: int, number: int) -> None:
        from wisp_core.engine.offline import SamplingParams

        config = self._config
        is_long = agent < config.num_long_agents
        length = config.long_prompt_tokens if is_long else config.prompt_tokens
        first, words = first_word_id() + agent % MODEL.topics * MODEL.words_per_topic, MODEL.words_per_topic
        offset = agent * 7 + number * 11 + self._seed * 5
        prompt = [first + (offset + place * 3) % words for place in range(length)]
        sampling = SamplingParams(
            max_tokens=config.output_tokens,
            temperature=1.0,
            seed=max(0, self._seed) * 1000 + agent * 10 + number,
            ignore_eos=True,
            extra_args={"wisp_session": f"tenant/user/{agent}"},
        )
        name = f"{self._seed}-{agent}-{number}-{time.monotonic_ns()}"
        self._running[name] = _Turn(agent, number, time.monotonic())
        self._engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def _take(self, output: Any, now_s: float) -> None:
        turn = self._running[output.request_id]
        turn.token_at_s += [now_s] * (len(output.outputs[0].token_ids) - len(turn.token_at_s))
        if output.finished:
            self._ended.append(self._running.pop(output.request_id))
            if turn.number + 1 < self._turns_per_agent:
                self._send(turn.agent, turn.number + 1)


def _times(turns: Sequence[_Turn]) -> Row:
    """Of turns from their sending to their end, of first tokens, and between two tokens of one turn."""
    whole = [turn.token_at_s[-1] - turn.sent_s for turn in turns]
    first = [turn.token_at_s[0] - turn.sent_s for turn in turns]
    gaps = np.concatenate([np.diff(turn.token_at_s) for turn in turns])
    return {
        "turns": len(turns),
        "mean_turn_s": float(np.mean(whole)),
        "p95_turn_s": float(np.percentile(whole, 95)),
        "mean_ttft_s": float(np.mean(first)),
        "p95_ttft_s": float(np.percentile(first, 95)),
        "gap_p50_s": float(np.percentile(gaps, 50)),
        "gap_p99_s": float(np.percentile(gaps, 99)),
        "gap_max_s": float(gaps.max()),
    }
