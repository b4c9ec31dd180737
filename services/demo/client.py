"""One streamed turn through the official OpenAI client, measured as a user sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from services.demo.workload import Message, Turn


@dataclass(frozen=True, kw_only=True)
class TurnResult:
    """What came back."""

    answer: Message
    ttft_s: float | None
    decode_s: float
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None


class _Answer:
    """Puts the deltas of a stream together to the assistant's message."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: Any) -> bool:
        """Add a delta, and say whether it had content."""
        self.text += delta.content or ""
        for part in delta.tool_calls or ():
            call = self.calls.setdefault(
                part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = part.id or call["id"]
            call["function"]["name"] = part.function.name or call["function"]["name"]
            call["function"]["arguments"] += part.function.arguments or ""
        return bool(delta.content or delta.tool_calls)

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message


async def stream_turn(client: AsyncOpenAI, model: str, turn: Turn, headers: dict[str, str], user: str) -> TurnResult:
    """Send ``turn`` and read the stream to its end; an error of any kind is part of the result."""
    started_s = time.monotonic()
    first_s: float | None = None
    answer, usage, finish, error = _Answer(), None, None, None
    try:
        stream = await client.chat.completions.create(
            **turn.request(model), user=user, stream=True, stream_options={"include_usage": True}, extra_headers=headers
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                if answer.add(choice.delta) and first_s is None:
                    first_s = time.monotonic()
    except OpenAIError as caught:
        error = f"{type(caught).__name__}: {caught}"
    if error is None and (finish is None or usage is None):
        error = "the stream ended early"
    return TurnResult(
        answer=answer.message(),
        ttft_s=None if first_s is None else first_s - started_s,
        decode_s=0.0 if first_s is None else time.monotonic() - first_s,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        error=error,
    )
