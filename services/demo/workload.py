"""What simulated agents say: bursts of short tool-call turns, and turns with a long document in them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from wisp_core.tiny_model.tiny_tokenizer import topic_words

Message = dict[str, Any]

# With the fields and in the order that the API writes it, since the prompt shows it as JSON. Strict: otherwise vLLM
# does not hold the arguments to their schema.
FIND_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Read a page.",
        "parameters": {
            "type": "object",
            "properties": {"page": {"type": "integer", "enum": list(range(1, 10))}},
            "required": ["page"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Who an agent works for, and on what."""

    tenant: str
    user: str
    session_id: str
    topic: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of an agent."""

    messages: tuple[Message, ...]
    max_tokens: int
    seed: int
    tools: tuple[dict[str, Any], ...] = ()
    is_tool_forced: bool = False

    def request(self, model: str) -> dict[str, Any]:
        """Fields of a chat completion request; sampled with a seed, since random weights repeat when greedy."""
        fields: dict[str, Any] = {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "seed": self.seed,
        }
        if self.tools:
            fields["tools"] = list(self.tools)
        if self.is_tool_forced:
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tools[0]["function"]["name"]}}
        return fields


@dataclass
class Agent:
    """A conversation that grows: ask for a turn, hand back the assistant's message, and so on."""

    spec: AgentSpec
    task: int = 0
    """Number of the conversation within the session; each has other words."""
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Not hash(): Python salts it, and runs shall be equal.
        self._random = random.Random(zlib.crc32(f"{self.spec.tenant}/{self.spec.session_id}/{self.task}".encode()))
        self._words = topic_words(self.spec.topic)
        self.messages.append({"role": "system", "content": self.say(12)})

    def say(self, num_words: int) -> str:
        """That many words of the agent's topic, a leading space included so that each is one token."""
        return " " + " ".join(self._random.choices(self._words, k=num_words))

    def burst_turn(self) -> Turn:
        """A short turn: a forced tool call, then an answer to the tool's result, and so on."""
        is_call = self.messages[-1]["role"] != "tool"
        if is_call:
            self.messages.append({"role": "user", "content": self.say(16)})
        return self._turn(64 if is_call else 20, (FIND_TOOL,), is_tool_forced=is_call)

    def long_turn(self, num_words: int, max_tokens: int = 48) -> Turn:
        """A turn that puts ``num_words`` more words into the context."""
        self.messages.append({"role": "user", "content": self.say(num_words)})
        return self._turn(max_tokens, (), is_tool_forced=False)

    def take(self, answer: Message) -> None:
        """Add the assistant's message, and the results of the tools it calls."""
        self.messages.append(answer)
        for call in answer.get("tool_calls") or ():
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.say(24)})

    def _turn(self, max_tokens: int, tools: Sequence[dict[str, Any]], *, is_tool_forced: bool) -> Turn:
        return Turn(
            messages=tuple(self.messages),
            max_tokens=max_tokens,
            seed=self._random.randrange(2**31),
            tools=tuple(tools),
            is_tool_forced=is_tool_forced,
        )
