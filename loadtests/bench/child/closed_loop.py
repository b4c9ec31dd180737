"""Plays a trace on an engine in this process: every client a stream of turns, each sent when the one before has ended.

Time passes here as it does for a service's clients: between two steps of the engine, turns that are due are added and
tokens that came out are noted.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from loadtests.bench.child.replay import request_id
from loadtests.bench.online.figures import TurnFigures
from wisp_core.simulator.trace import Trace, TraceTurn

_FIRST_TOKEN_ID = 3  # those before mean something to a tokenizer


@dataclass(slots=True)
class _Running:
    """A turn that the engine has, and what came of it so far."""

    turn: TraceTurn
    prompt_tokens: int
    sent_s: float
    first_s: float | None = None
    tokens: list[int] = field(default_factory=list)


class ClosedLoop:
    """One run over ``trace``; moments are seconds since `play` began."""

    def __init__(
        self, llm: LLM, trace: Trace, *, name: str, vocab_size: int, every_s: float, tick: Callable[[float], None]
    ) -> None:
        """``name`` makes requests and prompts unlike those of any other run; ``tick`` is called each ``every_s``."""
        self.figures: list[TurnFigures] = []
        self._engine, self._trace, self._name, self._vocab_size = llm.llm_engine, trace, name, vocab_size
        self._every_s, self._tick, self._next_tick_s = every_s, tick, 0.0
        self._waiting: dict[int, deque[TraceTurn]] = {}
        self._due: list[tuple[float, int]] = []  # moment, client
        self._running: dict[str, _Running] = {}
        self._texts: defaultdict[int, list[int]] = defaultdict(list)
        self._num_sent = 0

    def play(self, deadline_s: float) -> float:
        """Phase after phase; returns how long it took. What runs at ``deadline_s`` is aborted and gives no figure."""
        self._started_s = time.monotonic()
        for phase in range(len(self._trace.phases)):
            self._open(phase)
            while self._due or self._running:
                if self._now_s() >= deadline_s:
                    self._abort()
                    return self._now_s()
                self._turn_over()
        return self._now_s()

    def _turn_over(self) -> None:
        """One step, or a pause until something is due."""
        now_s = self._now_s()
        if now_s >= self._next_tick_s:
            self._tick(now_s)
            self._next_tick_s = max(self._next_tick_s + self._every_s, now_s)
        while self._due and self._due[0][0] <= self._now_s():
            self._send(heapq.heappop(self._due)[1])
        if self._running:
            self._take(self._engine.step())
        elif self._due:
            time.sleep(max(0.0, min(self._due[0][0], self._next_tick_s) - self._now_s()))

    def _open(self, phase: int) -> None:
        begun_s = self._now_s()
        self._waiting = {}
        for turn in self._trace:
            if turn.phase == phase:
                self._waiting.setdefault(turn.client, deque()).append(turn)
        for client, turns in self._waiting.items():
            heapq.heappush(self._due, (begun_s + max(turns[0].at_s, turns[0].think_s), client))

    def _send(self, client: int) -> None:
        turn = self._waiting[client].popleft()
        tokens = self._grown(turn)
        params = SamplingParams(
            temperature=1.0,
            seed=turn.session,
            max_tokens=turn.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # A topic is a session of the routing trace: conversations on it want the same experts.
        name = request_id(turn.topic, f"{self._name}-{self._num_sent}")
        self._num_sent += 1
        self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)
        self._running[name] = _Running(turn, len(tokens), self._now_s())

    def _grown(self, turn: TraceTurn) -> list[int]:
        """The conversation so far, with what the turn adds."""
        tokens = self._texts[turn.session]
        rng = random.Random(f"{self._name}:{turn.session}:{len(tokens)}")
        missing = max(0, turn.prompt_tokens - len(tokens))
        tokens.extend(rng.randrange(_FIRST_TOKEN_ID, self._vocab_size) for _ in range(missing))
        return tokens

    def _take(self, outputs: list[Any]) -> None:
        now_s = self._now_s()
        for output in outputs:
            running = self._running[output.request_id]
            new = output.outputs[0].token_ids
            if new and running.first_s is None:
                running.first_s = now_s
            running.tokens.extend(new)
            if output.finished:
                self._end(output.request_id, now_s)

    def _end(self, name: str, now_s: float) -> None:
        running = self._running.pop(name)
        turn = running.turn
        self._texts[turn.session].extend(running.tokens)
        is_whole = len(running.tokens) == turn.output_tokens
        self.figures.append(
            TurnFigures(
                client=turn.client,
                session=turn.session,
                phase=turn.phase,
                sent_at_s=running.sent_s,
                ttft_s=None if running.first_s is None else running.first_s - running.sent_s,
                duration_s=now_s - running.sent_s,
                prompt_tokens=running.prompt_tokens,
                completion_tokens=len(running.tokens),
                error=None if is_whole else f"{len(running.tokens)} of {turn.output_tokens} tokens",
            )
        )
        following = self._waiting[turn.client]
        if following:
            heapq.heappush(self._due, (now_s + following[0].think_s, turn.client))

    def _abort(self) -> None:
        self._engine.abort_request(list(self._running))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s
