"""How many tokens a prefill pass takes (vLLM's max_num_batched_tokens): fewer passes against memory for activations.

A pass over a long prompt brings every expert that is in no slot across the link once, so half as many passes take half
as long. But a larger pass needs memory for its activations, which are slots less for every step. Both are seconds of
the engine per turn, and the sum is compared: at each size, with the cap that leaves the declared turns their KV.

`wisp plan` and an engine that is given no size choose by this one function.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wisp_core.contracts import MemoryLayout
from wisp_core.errors import ConfigurationError
from wisp_core.planner.cards import Card
from wisp_core.planner.estimate import EngineChoice, engine_model, memory_layout, other_bytes
from wisp_core.planner.model_shape import ModelShape
from wisp_core.settings import EngineSettings
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.expert_curves import ExpertCurves
from wisp_core.simulator.trace import Trace

CHUNKS = (1024, 2048, 4096, 8192, 16384)
"""Tokens of a pass that are tried."""
COLD_SHARE = 1 / 8
"""Of all turns, those whose prefix is no longer there, so that the whole context is computed."""
GOOD_ENOUGH = 1.02
"""Of sizes so close to the best the largest is taken: a long prompt then waits for fewer passes."""
_MAX_LENGTHS = 200  # turns that are looked at


@dataclass(frozen=True, kw_only=True)
class ChunkOption:
    """One size and what it would do."""

    choice: EngineChoice
    other_bytes: int
    """Outside the pools, the activations of a pass included."""
    pooled_bytes: int
    layout: MemoryLayout
    model: EngineModel
    cap: int
    """The largest one that leaves the declared turns their KV."""
    turn_s: float
    """Engine seconds of a mean turn, all declared turns at once."""

    @property
    def tokens(self) -> int:
        """Of a pass."""
        return self.choice.max_num_batched_tokens

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: cap {self.cap} beside {self.other_bytes / 1e9:.2f} GB, {self.turn_s:.2f} s a turn"
        )


@dataclass(frozen=True, kw_only=True)
class ChunkChoice:
    """The chosen size among all that fit, ascending."""

    chosen: ChunkOption
    options: tuple[ChunkOption, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.options))


def choose_chunk(
    shape: ModelShape,
    card: Card,
    curves: ExpertCurves,
    workload: Trace,
    *,
    budget_bytes: int,
    concurrency: int,
    max_model_len: int,
    floor_blocks: int,
    settings: EngineSettings,
    block_size: int = 16,
    chunks: tuple[int, ...] = CHUNKS,
) -> ChunkChoice:
    """The largest of ``chunks`` within `GOOD_ENOUGH` of the best.

    Args:
        shape: The model's.
        card: Its device and link.
        curves: Misses of a decode step by cap.
        workload: Turns with their new tokens, contexts and outputs.
        budget_bytes: Everything that the engine may hold.
        concurrency: Turns that run at once.
        max_model_len: Longest context, tokens.
        floor_blocks: κ_min of those turns, KV blocks.
        settings: The engine's; sizes beyond its ``other_bytes`` do not fit.
        block_size: Tokens of a KV block.
        chunks: Sizes to try; those beyond ``max_model_len`` count as that.

    Raises:
        ConfigurationError: Not even the smallest one fits.
    """
    options: dict[int, ChunkOption] = {}
    problem: ConfigurationError | None = None
    for tokens in chunks:
        choice = EngineChoice(
            max_model_len=max_model_len,
            max_num_seqs=concurrency,
            max_num_batched_tokens=min(tokens, max(max_model_len, 256)),
            block_size=block_size,
            settings=settings,
        )
        try:
            options[choice.max_num_batched_tokens] = _option(
                shape, card, curves, workload, choice, budget_bytes=budget_bytes, floor_blocks=floor_blocks
            )
        except ConfigurationError as error:
            problem = problem or error
    if not options:
        assert problem is not None
        raise problem
    ascending = tuple(options[tokens] for tokens in sorted(options))
    best_s = min(option.turn_s for option in ascending)
    chosen = [option for option in ascending if option.turn_s <= GOOD_ENOUGH * best_s][-1]
    return ChunkChoice(chosen=chosen, options=ascending)


def _option(
    shape: ModelShape,
    card: Card,
    curves: ExpertCurves,
    workload: Trace,
    choice: EngineChoice,
    *,
    budget_bytes: int,
    floor_blocks: int,
) -> ChunkOption:
    outside = other_bytes(shape, choice)
    pooled_bytes = budget_bytes - outside
    layout = memory_layout(shape, choice, pooled_bytes=pooled_bytes, page_bytes=card.page_bytes)
    cap = _largest_cap(layout, pooled_bytes, floor_blocks)
    model = engine_model(shape, card, choice, curves, layout=layout, pooled_bytes=pooled_bytes)
    topics = min(choice.max_num_seqs, workload.num_topics)
    return ChunkOption(
        choice=choice,
        other_bytes=outside,
        pooled_bytes=pooled_bytes,
        layout=layout,
        model=model,
        cap=cap,
        turn_s=_turn_s(model, workload, cap, choice.max_num_seqs, topics),
    )


def _largest_cap(layout: MemoryLayout, pooled_bytes: int, floor_blocks: int) -> int:
    """Raises ConfigurationError when even the smallest cap leaves less KV than the floor."""
    caps = range(layout.min_cap, layout.num_experts + 1)
    kv_bytes = layout.kv_bytes(floor_blocks)
    fitting = [cap for cap in caps if layout.experts_bytes_by_cap[cap] + kv_bytes <= pooled_bytes]
    if not fitting:
        needed_bytes = layout.experts_bytes_by_cap[layout.min_cap] + kv_bytes
        raise ConfigurationError(
            f"{needed_bytes} bytes are needed for cap {layout.min_cap} and κ_min of {floor_blocks} KV blocks, "
            f"{pooled_bytes} are left for both pools: {needed_bytes - pooled_bytes} more"
        )
    return fitting[-1]


def _turn_s(model: EngineModel, workload: Trace, cap: int, concurrency: int, topics: int) -> float:
    """Its prefill, and its share of the decode steps."""
    turns = workload.turns[np.linspace(0, len(workload) - 1, min(len(workload), _MAX_LENGTHS)).astype(int)]
    prompts = turns["prompt_tokens"]
    new = np.maximum(prompts - turns["prefix_tokens"], 1)
    warm_s, cold_s = (np.mean([model.first_token_s(cap, int(n)) for n in lengths]) for lengths in (new, prompts))
    step_s = model.decode_step(cap, concurrency, topics).seconds / concurrency
    prefill_s = (1 - COLD_SHARE) * warm_s + COLD_SHARE * cold_s
    return float(prefill_s + step_s * np.mean(turns["output_tokens"]))
