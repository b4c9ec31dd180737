"""Runs the phases of the demo: concurrent agent sessions of three tenants, each through its own OpenAI client."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from openai import AsyncOpenAI

from services.demo.client import TurnResult, stream_turn
from services.demo.identity import RecordedTurn
from services.demo.workload import Agent, AgentSpec, Turn
from services.ingress.sessions import SESSION_HEADER

_ARRIVAL_S = 0.15
"""Time between the starts of two sessions: agents do not arrive in the same instant."""
_PHASE_S = 22.0
_SESSIONS_PER_USER = {"bursts": 2, "long contexts": 1}
_BURST_PAUSE_S = 0.1
_BURST_CONTEXT_TOKENS = 600
"""An agent whose context is longer starts a new conversation, as agents do between tasks."""
_DOCUMENT_WORDS = 3000
_FOLLOW_UP_WORDS = 120


class Phase(StrEnum):
    """A kind of work."""

    BURSTS = "bursts"
    LONG = "long contexts"


@dataclass
class SessionFigures:
    """What one session saw."""

    spec: AgentSpec
    results: list[TurnResult] = field(default_factory=list)
    num_tasks: int = 0

    @property
    def num_failed(self) -> int:
        """Turns without a complete answer."""
        return sum(result.error is not None for result in self.results)

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to the first content."""
        times = [result.ttft_s for result in self.results if result.ttft_s is not None]
        return sum(times) / len(times) if times else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed of one stream: tokens after the first, per second."""
        tokens = sum(max(0, result.completion_tokens - 1) for result in self.results)
        seconds = sum(result.decode_s for result in self.results)
        return tokens / seconds if seconds > 0 else 0.0


class Driver:
    """Drives sessions and keeps what they saw."""

    def __init__(self, clients: dict[str, AsyncOpenAI], model: str) -> None:
        self._clients = clients
        self._model = model
        self.sessions: dict[str, SessionFigures] = {}
        self.recorded: list[RecordedTurn] = []

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return sum(len(figures.results) for figures in self.sessions.values())

    @property
    def num_failed(self) -> int:
        """Turns so far without a complete answer."""
        return sum(figures.num_failed for figures in self.sessions.values())

    @property
    def errors(self) -> Counter[str]:
        """Errors so far, and how often each came."""
        results = (result for figures in self.sessions.values() for result in figures.results)
        return Counter(result.error for result in results if result.error is not None)

    async def run(self, phase: Phase, label: str) -> None:
        """Run one phase to its end; every session gets at least one turn."""
        deadline_s = time.monotonic() + _PHASE_S
        play = self._play_bursts if phase is Phase.BURSTS else self._play_long
        async with asyncio.TaskGroup() as group:
            for spec in self._specs(phase):
                group.create_task(play(spec, label, deadline_s))
                await asyncio.sleep(_ARRIVAL_S)

    def _specs(self, phase: Phase) -> list[AgentSpec]:
        """Two users per tenant, each with a topic of its own."""
        kind = "burst" if phase is Phase.BURSTS else "long"
        return [
            AgentSpec(tenant=tenant, user=f"user-{user}", session_id=f"{kind}-{user}-{number}", topic=2 * index + user)
            for index, tenant in enumerate(self._clients)
            for user in range(2)
            for number in range(_SESSIONS_PER_USER[phase])
        ]

    async def _play_bursts(self, spec: AgentSpec, label: str, deadline_s: float) -> None:
        agent, context_tokens = self._new_agent(spec), 0
        while time.monotonic() < deadline_s:
            if context_tokens > _BURST_CONTEXT_TOKENS:
                agent = self._new_agent(spec)
            result = await self._turn(agent, agent.burst_turn(), label)
            context_tokens = result.prompt_tokens + result.completion_tokens
            await asyncio.sleep(_BURST_PAUSE_S)

    async def _play_long(self, spec: AgentSpec, label: str, deadline_s: float) -> None:
        while time.monotonic() < deadline_s:
            agent = self._new_agent(spec)
            await self._turn(agent, agent.long_turn(_DOCUMENT_WORDS), label)
            await self._turn(agent, agent.long_turn(_FOLLOW_UP_WORDS), label)

    def _new_agent(self, spec: AgentSpec) -> Agent:
        figures = self.sessions.setdefault(f"{spec.tenant}/{spec.user}/{spec.session_id}", SessionFigures(spec))
        figures.num_tasks += 1
        return Agent(spec, task=figures.num_tasks)

    async def _turn(self, agent: Agent, turn: Turn, label: str) -> TurnResult:
        spec = agent.spec
        result = await stream_turn(
            self._clients[spec.tenant], self._model, turn, {SESSION_HEADER: spec.session_id}, spec.user
        )
        self.sessions[f"{spec.tenant}/{spec.user}/{spec.session_id}"].results.append(result)
        if result.error is None:
            agent.take(result.answer)
            self.recorded.append(RecordedTurn(label, spec.tenant, turn))
        return result
