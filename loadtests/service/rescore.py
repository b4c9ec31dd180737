"""How far each token of answers is from the best one, by an engine that holds every expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.demo.reference import ask_resident

Answer = dict[str, Any]
"""``prompt``: text of one user message; ``tokens``: texts of the answer's tokens, decoded greedily."""


def rescore(model: str, engine_args: dict[str, Any], answers: Sequence[Answer], directory: Path) -> list[float]:
    """For each answer, the largest distance of a token's log-probability from the best one's at its place.

    In a process of its own. Raises EngineUnavailableError with its last words if it fails.
    """
    return ask_resident("loadtests.service.rescore:gaps", model, engine_args, answers, directory)


def gaps(engine: Any, answers: Sequence[Answer]) -> list[float]:
    """What ``rescore`` gives, of a running engine."""
    from wisp_core.engine.offline import SamplingParams

    tokenizer = engine.llm.get_tokenizer()
    ids_by_text = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    found = []
    for answer in answers:
        messages = [{"role": "user", "content": answer["prompt"]}]
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        chosen = [ids_by_text[text] for text in answer["tokens"]]
        (output,) = engine.generate([{"prompt_token_ids": prompt + chosen}], sampling)
        rows = output.prompt_logprobs[len(prompt) :]
        best = [max(entry.logprob for entry in row.values()) for row in rows]
        picked = [row[token].logprob for row, token in zip(rows, chosen, strict=True)]
        found.append(max((high - own for high, own in zip(best, picked, strict=True)), default=0.0))
    return found
