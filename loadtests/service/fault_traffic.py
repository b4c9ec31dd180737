"""Sessions that keep sending turns to a service while its parts are killed, and what each of them saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from loadtests.service.running import RunningService
from wisp_core.model.tiny_tokenizer import topic_words

TENANT = "acme"
RESEND_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """What is sent."""

    model: str
    sessions: int = 6
    max_tokens: int = 40
    pause_s: float = 0.25
    """Between a session's turns, at most; chosen anew each time."""


@dataclass
class TurnSeen:
    """One turn, as its client saw it."""

    began_s: float
    prompt: str
    tokens: list[str] = field(default_factory=list)
    error: str | None = None
    attempts: int = 1

    @property
    def is_lost(self) -> bool:
        """Failed, and nothing had come."""
        return self.error is not None and not self.tokens


class Traffic:
    """Sessions that send one turn after the other."""

    def __init__(self, service: RunningService, client: httpx.AsyncClient, config: TrafficConfig) -> None:
        self.turns: list[TurnSeen] = []
        """Those that have ended."""
        self.in_flight: list[TurnSeen] = []
        self.may_resend = False
        """Whether a turn that failed before its first token is sent once more."""
        self.config = config
        self._client = client
        self._key = service.key(TENANT)

    async def run(self, session: int) -> None:
        """Send turns until cancelled."""
        chooser = random.Random(session)
        headers = {"authorization": f"Bearer {self._key}", "x-session-id": f"s{session}"}
        while True:
            seen = TurnSeen(time.monotonic(), " " + " ".join(chooser.choices(topic_words(session % 8), k=30)))
            self.in_flight.append(seen)
            await self._send(seen, headers)
            if seen.is_lost and self.may_resend:
                await asyncio.sleep(RESEND_PAUSE_S)
                seen.error, seen.attempts = None, 2
                await self._send(seen, headers)
            self.in_flight.remove(seen)
            self.turns.append(seen)
            await asyncio.sleep(chooser.uniform(0.0, self.config.pause_s))

    async def _send(self, seen: TurnSeen, headers: dict[str, str]) -> None:
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": seen.prompt}],
            "max_tokens": self.config.max_tokens,
            "temperature": 0,
            "logprobs": True,
            "stream": True,
        }
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    seen.error = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
                    return
                await _read_tokens(seen, response)
        except httpx.HTTPError as error:
            seen.error = type(error).__name__

    def good_since(self, time_s: float) -> int:
        """Turns that began later and were answered in full."""
        return sum(turn.began_s >= time_s and turn.error is None for turn in self.turns)


async def _read_tokens(seen: TurnSeen, response: httpx.Response) -> None:
    is_done = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                seen.error = event["error"]["message"]
                return
            for choice in event["choices"]:
                seen.tokens += [one["token"] for one in (choice.get("logprobs") or {}).get("content") or ()]
    if not is_done:
        seen.error = "the stream ended early"


@asynccontextmanager
async def traffic(service: RunningService, config: TrafficConfig) -> AsyncIterator[Traffic]:
    """Sessions run while the context is open."""
    async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
        running = Traffic(service, client, config)
        tasks = [asyncio.create_task(running.run(session)) for session in range(config.sessions)]
        try:
            yield running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
