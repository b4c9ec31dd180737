"""Sessions that keep sending turns to a service while its parts are killed, and what each of them saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from loadtests.service.running import RunningService
from loadtests.service.stream_client import StreamedTurn, stream_chat
from wisp_core.tiny_model.tiny_tokenizer import topic_words

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


class Traffic:
    """Sessions that send one turn after the other."""

    def __init__(self, service: RunningService, client: httpx.AsyncClient, config: TrafficConfig) -> None:
        self.turns: list[StreamedTurn] = []
        """Those that have ended."""
        self.in_flight: list[StreamedTurn] = []
        self.may_resend = False
        """Whether a turn that failed before its first token is sent once more."""
        self.config = config
        self._client = client
        self._key = service.key(TENANT)

    async def run(self, session: int) -> None:
        """Send turns until cancelled."""
        chooser = random.Random(session)
        while True:
            turn = StreamedTurn(prompt=" " + " ".join(chooser.choices(topic_words(session % 8), k=30)))
            self.in_flight.append(turn)
            await self._send(turn, session)
            if turn.is_lost and self.may_resend:
                await asyncio.sleep(RESEND_PAUSE_S)
                turn.error, turn.attempts = None, 2
                await self._send(turn, session)
            self.in_flight.remove(turn)
            self.turns.append(turn)
            await asyncio.sleep(chooser.uniform(0.0, self.config.pause_s))

    async def _send(self, turn: StreamedTurn, session: int) -> None:
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": turn.prompt}],
            "max_tokens": self.config.max_tokens,
            "temperature": 0,
            "logprobs": True,
        }
        await stream_chat(self._client, self._key, body, f"s{session}", turn)

    def good_since(self, time_s: float) -> int:
        """Turns that were sent later and answered in full."""
        return sum(turn.sent_at_s >= time_s and turn.error is None for turn in self.turns)


@asynccontextmanager
async def traffic(service: RunningService, config: TrafficConfig) -> AsyncIterator[Traffic]:
    """Sessions run while the context is open."""
    async with httpx.AsyncClient(base_url=service.url, timeout=120, trust_env=False) as client:
        running = Traffic(service, client, config)
        tasks = [asyncio.create_task(running.run(session)) for session in range(config.sessions)]
        try:
            yield running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
