"""What the engine tests share: vLLM without its warnings, prompts, and answers that can be compared byte by byte."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

with warnings.catch_warnings():
    # vLLM and torch warn about each other while they are imported; import this file before them.
    warnings.simplefilter("ignore")
    from vllm import RequestOutput, SamplingParams


from wisp_core.contracts import ReplicaSnapshot, Split

MIB = 1 << 20
BUDGET_BYTES = 128 * MIB
ACTIVATION_BYTES = 8 * MIB
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 512,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,  # longer prompts are prefilled in chunks
    "dtype": "float32",  # answers then do not depend on who else is in the batch
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}

Answer = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]
"""Tokens, and for each the log-probabilities of the likeliest ones."""


def prompt(number: int, num_tokens: int) -> dict[str, list[int]]:
    """A prompt that shares no block with one of another number."""
    return {"prompt_token_ids": [5 + (number * 131 + place * 17) % 900 for place in range(num_tokens)]}


def sampling(number: int, max_tokens: int = 24, session: str = "") -> SamplingParams:
    """Every third prompt greedy, the others sampled with a seed; log-probabilities of each token."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if number % 3 == 0 else 1.0,
        seed=number,
        logprobs=2,
        ignore_eos=True,
        extra_args={"wisp_session": session} if session else None,
    )


PROMPTS = [prompt(number, 20 + 45 * number) for number in range(8)]
SAMPLING = [sampling(number) for number in range(8)]


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """What must be equal."""
    return [
        (
            tuple(output.outputs[0].token_ids),
            tuple(
                tuple(sorted((token, float(entry.logprob)) for token, entry in likeliest.items()))
                for likeliest in output.outputs[0].logprobs or ()
            ),
        )
        for output in outputs
    ]


def full_split(snapshot: ReplicaSnapshot, cap: int) -> Split:
    """``cap`` slots, the rest of the budget as KV."""
    layout = snapshot.layout
    return Split(cap=cap, kv_blocks=layout.kv_blocks_within(snapshot.budget_bytes - layout.experts_bytes_by_cap[cap]))
