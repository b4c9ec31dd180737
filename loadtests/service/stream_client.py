"""One streamed turn over raw HTTP, with the time of each piece, as a client sees it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(kw_only=True)
class StreamedTurn:
    """What has come back so far; times are seconds since the turn was sent."""

    prompt: str = ""
    sent_at_s: float = field(default_factory=time.monotonic)
    attempts: int = 1
    status: int = 0
    retry_after_s: float | None = None
    pieces_s: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    """Of the whole answer, as the server counts them."""
    token_texts: list[str] = field(default_factory=list)
    """Of a turn that asks for log-probabilities."""
    error: str | None = None
    duration_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        return self.pieces_s[0]

    @property
    def time_per_token_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.duration_s - self.pieces_s[0]) / max(1, self.tokens - 1)

    @property
    def is_lost(self) -> bool:
        """Failed, and nothing had come."""
        return self.error is not None and not self.token_texts


async def stream_chat(
    client: httpx.AsyncClient, key: str, body: dict[str, Any], session: str, turn: StreamedTurn | None = None
) -> StreamedTurn:
    """Send a chat turn and read it to its end; an error of any kind is part of the result.

    ``turn`` is filled while the answer comes, for whoever wants to look at it meanwhile.
    """
    turn = turn or StreamedTurn()
    headers = {"authorization": f"Bearer {key}", "x-session-id": session}
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=request, headers=headers) as response:
            turn.status = response.status_code
            if response.status_code == 200:
                await _read(turn, response)
            else:
                retry_after = response.headers.get("retry-after")
                turn.retry_after_s = None if retry_after is None else float(retry_after)
                turn.error = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
    except httpx.HTTPError as error:
        turn.error = type(error).__name__
    turn.duration_s = time.monotonic() - turn.sent_at_s
    return turn


async def _read(turn: StreamedTurn, response: httpx.Response) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            turn.error = str(event["error"]["message"])
            return
        if usage := event.get("usage"):
            turn.tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            turn.token_texts += [one["token"] for one in (choice.get("logprobs") or {}).get("content") or ()]
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if text:
            turn.pieces_s.append(time.monotonic() - turn.sent_at_s)
            turn.text += text
    turn.error = "the stream ended early"
