"""Replays recorded prompts on a live paged replica and on an engine with all experts, and compares every token."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from services.config import ServiceConfig
from services.demo.reference import ask_resident
from services.demo.workload import Turn
from services.ingress.sessions import SALT_HEADER, SESSION_HEADER

REPLAY_TOKENS = 24

Answer = list[list[Any]]
"""``[token text, log-probability]`` of each token."""


@dataclass(frozen=True)
class RecordedTurn:
    """A turn that was answered, with where it came from."""

    phase: str
    tenant: str
    turn: Turn

    def request(self, model: str) -> dict[str, Any]:
        """The same prompt, tools included, sampled freely: a grammar would decide tokens instead of the model."""
        fields = self.turn.request(model) | {"max_tokens": REPLAY_TOKENS}
        return fields | ({"tool_choice": "none"} if self.turn.tools else {})


def pick(recorded: Sequence[RecordedTurn], num_samples: int) -> list[RecordedTurn]:
    """``num_samples`` turns spread evenly over phases and tenants, the longest prompts of each group among them."""
    groups: dict[tuple[str, str], list[RecordedTurn]] = defaultdict(list)
    for turn in recorded:
        groups[turn.phase, turn.tenant].append(turn)
    for turns in groups.values():
        turns.sort(key=lambda turn: len(str(turn.turn.messages)), reverse=True)
    picked: list[RecordedTurn] = []
    while len(picked) < num_samples and any(groups.values()):
        for turns in groups.values():
            if turns:
                # From both ends in turn, so that long and short prompts come.
                picked.append(turns.pop(0 if len(picked) // len(groups) % 2 == 0 else -1))
    return picked[:num_samples]


async def replay_live(clients: dict[str, AsyncOpenAI], model: str, samples: Sequence[RecordedTurn]) -> list[Answer]:
    """Answers of a replica; one at a time, each with a salt nobody has used."""
    answers = []
    for sample in samples:
        completion = await clients[sample.tenant].chat.completions.create(
            **sample.request(model),
            logprobs=True,
            extra_headers={SESSION_HEADER: "identity", SALT_HEADER: uuid.uuid4().hex},
        )
        content = completion.choices[0].logprobs.content
        answers.append([[token.token, token.logprob] for token in content])
    return answers


def answer_resident(config: ServiceConfig, samples: Sequence[RecordedTurn]) -> list[Answer]:
    """The same prompts on an engine that holds every expert. Raises EngineUnavailableError, its last words."""
    engine_args = config.replica.engine | {"kv_cache_memory_bytes": config.replica.vram_budget_bytes}
    requests = [sample.request(config.model.name) for sample in samples]
    function = "services.demo.reference:answers"
    return ask_resident(function, config.model.path, engine_args, requests, config.state_dir)


def find_mismatches(samples: Sequence[RecordedTurn], live: Sequence[Answer], resident: Sequence[Answer]) -> list[str]:
    """One line for each answer that differs in any token or log-probability."""
    lines = []
    for sample, here, there in zip(samples, live, resident, strict=True):
        if here != there:
            position = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), -1)
            lines.append(
                f"phase {sample.phase}, {sample.tenant}, token {position} of {len(here)} and {len(there)}: "
                f"{here[position]} live, {there[position]} resident"
            )
    return lines
