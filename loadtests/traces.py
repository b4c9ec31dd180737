"""Agent workloads as traces: five named workflows, seeded, for the simulator and for drivers of a real service.

A workflow is phases of agents. An agent holds a conversation that grows by what it sends and what it gets, pauses as
its tools or its user take time, and begins anew when its task is done or its context is full. Equal arguments give
equal traces; the seed decides every number, the workflow's figures do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from wisp_core.errors import ConfigurationError
from wisp_core.simulator.trace import Trace, TraceTurn

Range = tuple[float, float]
"""Least and largest; drawn log-uniformly, so that short ones are as usual as long ones are rare."""

FULL_CONTEXT_TOKENS = 32768
"""Context that the workflows' figures are meant for."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """How one kind of agent works; lengths in tokens, pauses in seconds."""

    first_prompt_tokens: Range
    """System prompt, tools and task."""
    added_tokens: Range
    """What each further turn adds: a tool's result, a message, a page."""
    output_tokens: Range
    turns: Range
    """Turns of one task."""
    gap_s: Range
    """Between two turns of a burst: the tool's time."""
    burst_turns: Range = (1, 1)
    """Turns without a long pause."""
    pause_s: Range = (1.0, 1.0)
    """Between two bursts: the user's time."""


TOOL_BURSTS = Agent(
    first_prompt_tokens=(600, 2000),
    added_tokens=(60, 400),
    output_tokens=(24, 96),
    turns=(8, 24),
    gap_s=(0.05, 0.4),
    burst_turns=(3, 8),
    pause_s=(3.0, 15.0),
)
LONG_RESEARCH = Agent(
    first_prompt_tokens=(6000, 20000),
    added_tokens=(400, 3000),
    output_tokens=(128, 400),
    turns=(3, 8),
    gap_s=(5.0, 30.0),
    burst_turns=(1, 1),
    pause_s=(10.0, 40.0),
)
CODING = Agent(
    first_prompt_tokens=(2500, 8000),
    added_tokens=(150, 1800),
    output_tokens=(48, 300),
    turns=(12, 40),
    gap_s=(0.5, 5.0),
    burst_turns=(4, 12),
    pause_s=(10.0, 60.0),
)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of a workflow."""

    name: str
    agents: tuple[tuple[Agent, int, str], ...]
    """Kind, number of concurrent agents, and tenant of each group."""
    share: float = 1.0
    """Part of the workload's turns."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workflow with its size; `generate` makes a trace of it."""

    name: str
    phases: tuple[Phase, ...]
    num_turns: int
    num_topics: int = 8
    max_context_tokens: int = FULL_CONTEXT_TOKENS
    """Longest prompt plus answer; prompts of the workflow shrink in proportion."""
    output_scale: float = 1.0
    """Factor on the length of answers."""
    time_scale: float = 1.0
    """Factor on all pauses."""
    agents_scale: float = 1.0
    """Factor on the number of concurrent agents."""
    sessions_per_user: int = 2
    is_topic_shared: bool = False
    """Control: every session's topic is drawn anew, so that users and tenants have no working set of their own."""


def _one_phase(name: str, agent: Agent, number: int) -> tuple[Phase, ...]:
    return (Phase(name=name, agents=((agent, number, "acme"),)),)


_MIXED = ((TOOL_BURSTS, 10, "acme"), (LONG_RESEARCH, 3, "globex"), (CODING, 4, "initech"))
_BURST_PHASE = Phase(name="bursts", agents=((TOOL_BURSTS, 20, "acme"),), share=1.0)
_LONG_PHASE = Phase(name="long contexts", agents=((LONG_RESEARCH, 6, "globex"),), share=0.25)

WORKFLOWS: dict[str, tuple[Phase, ...]] = {
    "tool_bursts": _one_phase("bursts", TOOL_BURSTS, 16),
    "long_research": _one_phase("long contexts", LONG_RESEARCH, 6),
    "coding_agent": _one_phase("coding", CODING, 6),
    "mixed_tenants": (Phase(name="mixed", agents=_MIXED),),
    "phase_shift": (_BURST_PHASE, _LONG_PHASE, _BURST_PHASE, _LONG_PHASE),
}


def workflow(name: str, num_turns: int, **changes: object) -> Workload:
    """The workflow ``name``, sized; ``changes`` are fields of `Workload`. Raises ConfigurationError."""
    if name not in WORKFLOWS:
        raise ConfigurationError(f"no workflow {name!r}: it is one of {', '.join(WORKFLOWS)}")
    return replace(Workload(name=name, phases=WORKFLOWS[name], num_turns=num_turns), **changes)  # type: ignore[arg-type]


def generate(workload: Workload, *, seed: int) -> Trace:
    """The trace of ``workload``: a fixed set of turns in closed loops, a phase after the other."""
    maker = _Maker(workload, np.random.default_rng(seed))
    shares = sum(phase.share for phase in workload.phases)
    for number, phase in enumerate(workload.phases):
        maker.add_phase(number, phase, max(1, round(workload.num_turns * phase.share / shares)))
    return Trace.of(
        maker.turns,
        tenants=tuple(maker.tenants),
        phases=tuple(phase.name for phase in workload.phases),
        has_barriers=len(workload.phases) > 1,
        source=f"{workload.name}, seed {seed}",
    )


def open_sessions(workload: Workload, *, sessions_per_s: float, seed: int) -> Trace:
    """The turns of ``workload``'s first phase, but every session a client of its own that comes at a random time.

    Sessions arrive as a Poisson process, so that any number of replicas can be loaded.
    """
    rng = np.random.default_rng(seed)
    maker = _Maker(workload, rng)
    phase = workload.phases[0]
    groups = [(agent, tenant) for agent, number, tenant in phase.agents for _ in range(number)]
    at_s = 0.0
    while len(maker.turns) < workload.num_turns:
        at_s += rng.exponential(1.0 / sessions_per_s)
        agent, tenant = groups[rng.integers(len(groups))]
        client = maker.new_client(tenant)
        maker.add_session(0, agent, client, at_s=at_s, max_turns=workload.num_turns - len(maker.turns))
    return Trace.of(
        maker.turns, tenants=tuple(maker.tenants), phases=(phase.name,), source=f"{workload.name}, open, seed {seed}"
    )


@dataclass(frozen=True)
class _Client:
    number: int
    user: int
    tenant: int
    topic: int


class _Maker:
    """Draws the turns."""

    def __init__(self, workload: Workload, rng: np.random.Generator) -> None:
        self._workload = workload
        self._rng = rng
        self._prompt_scale = workload.max_context_tokens / FULL_CONTEXT_TOKENS
        self._num_clients = 0
        self._num_sessions = 0
        self.turns: list[TraceTurn] = []
        self.tenants: list[str] = []

    def add_phase(self, number: int, phase: Phase, num_turns: int) -> None:
        """Concurrent agents that share ``num_turns`` turns by how fast their kind works."""
        scale = self._workload.agents_scale
        groups = [(agent, max(1, round(count * scale)), tenant) for agent, count, tenant in phase.agents]
        weights = [count / _turn_s(agent) for agent, count, _ in groups]
        for (agent, count, tenant), weight in zip(groups, weights, strict=True):
            for one in range(count):
                share = num_turns * weight / sum(weights) / count
                turns = max(1, math.floor(share * (one + 1)) - math.floor(share * one))
                self._add_client(number, agent, self.new_client(tenant), turns)

    def new_client(self, tenant: str) -> _Client:
        """The next client; users and topics go round."""
        if tenant not in self.tenants:
            self.tenants.append(tenant)
        number = self._num_clients
        self._num_clients += 1
        user = number // self._workload.sessions_per_user
        return _Client(number, user, self.tenants.index(tenant), user % self._workload.num_topics)

    def _add_client(self, phase: int, agent: Agent, client: _Client, num_turns: int) -> None:
        at_s = self._draw(agent.pause_s) * self._workload.time_scale * self._rng.random()
        while num_turns > 0:
            num_turns -= self.add_session(phase, agent, client, at_s=at_s, max_turns=num_turns)
            at_s = 0.0

    def add_session(self, phase: int, agent: Agent, client: _Client, *, at_s: float, max_turns: int) -> int:
        """One conversation, cut after ``max_turns``; returns its turns."""
        workload = self._workload
        session = self._num_sessions
        self._num_sessions += 1
        num_turns = min(max_turns, round(self._draw(agent.turns)))
        topic = int(self._rng.integers(workload.num_topics)) if workload.is_topic_shared else client.topic
        prompt, prefix, in_burst = self._tokens(agent.first_prompt_tokens), 0, round(self._draw(agent.burst_turns))
        for index in range(num_turns):
            output = max(1, round(self._draw(agent.output_tokens) * workload.output_scale))
            output = min(output, workload.max_context_tokens // 4)
            if prompt + output > workload.max_context_tokens:
                if index > 0:
                    return index
                prompt = workload.max_context_tokens - output
            is_new_burst = in_burst == 0 or index == 0
            think_s = self._draw(agent.pause_s if is_new_burst else agent.gap_s) * workload.time_scale
            in_burst = round(self._draw(agent.burst_turns)) if in_burst == 0 else in_burst
            in_burst -= 1
            is_client_first = at_s > 0 and index == 0
            self.turns.append(
                TraceTurn(
                    client=client.number,
                    session=session,
                    user=client.user,
                    tenant=client.tenant,
                    topic=topic,
                    phase=phase,
                    at_s=at_s if is_client_first else 0.0,
                    think_s=0.0 if is_client_first else think_s,
                    prompt_tokens=prompt,
                    prefix_tokens=prefix,
                    output_tokens=output,
                )
            )
            prefix = prompt + output
            prompt = prefix + self._tokens(agent.added_tokens)
        return num_turns

    def _tokens(self, span: Range) -> int:
        return max(1, round(self._draw(span) * self._prompt_scale))

    def _draw(self, span: Range) -> float:
        low, high = span
        return float(low * (high / low) ** self._rng.random())


def _turn_s(agent: Agent) -> float:
    """Time of a turn and its pause, roughly, on an engine of some 20 tokens per second."""
    mean: Callable[[Range], float] = lambda span: math.sqrt(span[0] * span[1])  # noqa: E731
    burst = mean(agent.burst_turns)
    return mean(agent.output_tokens) / 20 + (mean(agent.gap_s) * (burst - 1) + mean(agent.pause_s)) / burst
