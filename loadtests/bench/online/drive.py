"""Plays a trace against a live service: every client a stream of turns, each sent when the one before has ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI, OpenAIError

from loadtests.bench.online.figures import TurnFigures
from services.ingress.sessions import SESSION_HEADER
from wisp_core.simulator.trace import Trace, TraceTurn
from wisp_core.tiny_model.tiny import TinyModelConfig


@dataclass
class _Conversation:
    """Text of one session and how many tokens it has."""

    words: list[str]
    other_words: list[str]
    other_share: float
    random: random.Random
    text: str = ""
    num_tokens: int = 0

    def grow_to(self, num_tokens: int) -> None:
        """Add words, each one token, up to ``num_tokens``."""
        missing = max(0, num_tokens - self.num_tokens)
        for _ in range(missing):
            is_other = self.random.random() < self.other_share
            self.text += f" {self.random.choice(self.other_words if is_other else self.words)}"
        self.num_tokens += missing


@dataclass
class Player:
    """Plays ``trace``; ``label`` makes prompts differ from those of any other run, so that no cache knows them."""

    trace: Trace
    clients: Mapping[str, AsyncOpenAI]
    model: str
    shape: TinyModelConfig
    label: int
    mixed_share: float = 0.0
    """Of a prompt's words are drawn from all topics, the others from the session's own."""
    figures: list[TurnFigures] = field(default_factory=list)
    _conversations: dict[int, _Conversation] = field(default_factory=dict)
    _all_words: list[str] = field(init=False)
    _started_s: float = 0.0

    def __post_init__(self) -> None:
        self._all_words = [word for topic in range(self.shape.topics) for word in self.shape.topic_words(topic)]

    async def play(self) -> None:
        """Phase after phase where the trace has barriers; what fails is a figure with its error."""
        self._started_s = time.monotonic()
        phases = sorted({turn.phase for turn in self.trace}) if self.trace.has_barriers else [None]
        for phase in phases:
            streams: dict[int, list[TraceTurn]] = defaultdict(list)
            for turn in self.trace:
                if phase is None or turn.phase == phase:
                    streams[turn.client].append(turn)
            phase_started_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for turns in streams.values():
                    group.create_task(self._play_client(turns, phase_started_s))

    async def _play_client(self, turns: Sequence[TraceTurn], phase_started_s: float) -> None:
        ended_s = phase_started_s
        for turn in turns:
            start_s = max(phase_started_s + turn.at_s, ended_s + turn.think_s)
            await asyncio.sleep(max(0.0, start_s - time.monotonic()))
            self.figures.append(await self._turn(turn))
            ended_s = time.monotonic()

    async def _turn(self, turn: TraceTurn) -> TurnFigures:
        talk = self._conversation(turn)
        talk.grow_to(turn.prompt_tokens)
        sent_s, first_s, text, usage, error = time.monotonic(), None, "", None, None
        try:
            stream = await self.clients[self.trace.tenants[turn.tenant]].completions.create(
                model=self.model,
                prompt=talk.text,
                max_tokens=turn.output_tokens,
                temperature=1.0,
                seed=turn.session,
                logit_bias={str(self.shape.eos_token_id): -100},  # answers are as long as the trace says
                user=f"user-{turn.user}",
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={SESSION_HEADER: f"{self.label}-{turn.session}"},
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    first_s = first_s or time.monotonic()
                    text += choice.text
        except OpenAIError as caught:
            error = f"{type(caught).__name__}: {caught}"
        if error is None and usage is None:
            error = "the stream ended early"
        if usage is not None:
            talk.text += text
            talk.num_tokens = usage.prompt_tokens + usage.completion_tokens
        return TurnFigures(
            client=turn.client,
            session=turn.session,
            phase=turn.phase,
            sent_at_s=sent_s - self._started_s,
            ttft_s=None if first_s is None else first_s - sent_s,
            duration_s=time.monotonic() - sent_s,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
            error=error,
        )

    def _conversation(self, turn: TraceTurn) -> _Conversation:
        if turn.session not in self._conversations:
            # One word of the run's own in front: equal words after it, and another hash for every block.
            own = self.shape.topic_words(turn.topic)[self.label % self.shape.words_per_topic]
            talk = _Conversation(
                words=self.shape.topic_words(turn.topic),
                other_words=self._all_words,
                other_share=self.mixed_share,
                random=random.Random(turn.session),
                text=f" {own}",
                num_tokens=1,
            )
            self._conversations[turn.session] = talk
        return self._conversations[turn.session]
