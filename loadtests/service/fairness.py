"""Tenant B's turns alone, beside a tenant A that floods, and beside one that thrashes the expert cache.

A may use a small share: by its limits and by its weight. It sends twenty times as much as its limits allow, or within
them turns of random tokens, each of which needs other experts than the turns of B. Each session of B sends one turn
after the other, with pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.rows import Row, quantile
from loadtests.service.running import RunningService, service_file, temporary_service, tenant
from loadtests.service.stream_client import StreamedTurn, stream_chat
from wisp_core.tiny_model.tiny import TinyModelConfig
from wisp_core.tiny_model.tiny_tokenizer import topic_words

MODEL = "tiny"
CONDITIONS = ("alone", "flood", "thrash", "ample")
"""What B has beside itself: nothing, a flood that A's quota refuses most of, turns that thrash the expert cache, or the
same flood by a tenant whose quota refuses none of it, so that only its weight bounds it."""
FLOOD_FACTOR = 20
MOST = 1.3
"""Times its value alone, to which another tenant may move what a tenant sees."""


@dataclass(frozen=True, kw_only=True)
class FairnessConfig:
    """One run. A's share is ``a_requests_per_minute``, about what one part in ``b_weight + 1`` of the engine serves."""

    name: str = "fairness"
    turns: int = 200
    """Of B, in each condition."""
    conditions: tuple[str, ...] = CONDITIONS[:3]
    max_condition_s: float = 600.0
    """A condition that takes longer ends with the turns it has."""
    b_sessions: int = 3
    b_prompt_words: int = 400
    b_tokens: int = 96
    b_pause_s: tuple[float, float] = (0.05, 0.3)
    """Between two turns of a session, at random."""
    b_weight: float = 9.0
    a_requests_per_minute: int = 12
    a_kv_share: float = 0.5
    a_prompt_words: int = 40
    a_tokens: int = 32
    ample_turns: int = 64
    """Turns at once of the tenant whose quota refuses nothing else."""
    thrash_sessions: int = 2
    """Of A, one turn after the other, within limits that do not refuse any."""
    cap: int = 16
    link_bytes_per_s: float = 1.2e9
    """Emulated."""
    batched_tokens: int = 128
    """Tokens of one step: what a turn waits for that comes while somebody else's prompt is computed."""


def service_config(directory: Path, config: FairnessConfig) -> dict[str, Any]:
    """One replica; ``thrash`` is a tenant like A whose limits refuse nothing."""
    replica = {
        "count": 1,
        "vram_budget_bytes": 70 << 20,
        "activation_bytes": 8 << 20,
        "initial_cap": config.cap,
        "emulated_link_bytes_per_s": config.link_bytes_per_s,
        "max_ongoing_turns": 256,
        "engine": {
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "max_num_batched_tokens": config.batched_tokens,
            "block_size": 32,
        },
    }
    a = {"weight": 1.0, "kv_share": config.a_kv_share}
    a_limits = {"requests_per_minute": config.a_requests_per_minute, "tokens_per_minute": 1_000_000}
    tenants = [
        tenant(directory, "b", max_concurrent_turns=256, weight=config.b_weight),
        tenant(directory, "a", **a_limits, **a),
        tenant(directory, "thrash", max_concurrent_turns=256, **a),
        tenant(directory, "ample", max_concurrent_turns=config.ample_turns, **a),
    ]
    return service_file("fairness", directory, MODEL, replica, tenants)


class Fairness:
    """The conditions, on one running service."""

    def __init__(self, service: RunningService, client: httpx.AsyncClient, config: FairnessConfig) -> None:
        self._service = service
        self._client = client
        self._config = config
        self._number = 0

    async def condition(self, name: str) -> Row:
        """A row: B's turns while A does what ``name`` says, one of ``CONDITIONS``."""
        others: dict[str, Callable[[], AbstractAsyncContextManager[list[StreamedTurn]]]] = {
            "alone": lambda: nullcontext([]),
            "flood": lambda: self._flood("a"),
            "thrash": self._thrash,
            "ample": lambda: self._flood("ample"),
        }
        async with others[name]() as done:
            await asyncio.sleep(2.0 if name != "alone" else 0.0)
            turns = await self._turns_of_b(self._config.turns)
        good = [turn for turn in turns if turn.error is None]
        row = {
            "condition": name,
            "turns": len(turns),
            "failed": len(turns) - len(good),
            "ttft_p50_s": quantile([turn.ttft_s for turn in good], 0.5),
            "ttft_p95_s": quantile([turn.ttft_s for turn in good], 0.95),
            "time_per_token_p50_s": quantile([turn.time_per_token_s for turn in good], 0.5),
            "time_per_token_p95_s": quantile([turn.time_per_token_s for turn in good], 0.95),
            "tokens": sum(turn.tokens for turn in good),
        }
        return row | _of_a(done)

    async def warm_up(self) -> None:
        """A few turns that are not counted."""
        await self._turns_of_b(3)

    async def _turns_of_b(self, count: int) -> list[StreamedTurn]:
        turns: list[StreamedTurn] = []
        until_s = time.monotonic() + self._config.max_condition_s

        async def run(session: int) -> None:
            chooser = random.Random(self._number * 100 + session)
            while len(turns) < count and time.monotonic() < until_s:
                turns.append(await self._turn("b", f"b-{session}", self._words_of_b(chooser), self._config.b_tokens, 0))
                await asyncio.sleep(chooser.uniform(*self._config.b_pause_s))

        self._number += 1
        async with asyncio.TaskGroup() as group:
            for session in range(self._config.b_sessions):
                group.create_task(run(session))
        return turns

    def _words_of_b(self, chooser: random.Random) -> str:
        words = topic_words(0)
        return " ".join(chooser.choices(words, k=self._config.b_prompt_words))

    async def _turn(self, tenant: str, session: str, words: str, tokens: int, temperature: float) -> StreamedTurn:
        self._number += 1
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f" {words}"}],
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": self._number,
        }
        return await stream_chat(self._client, self._service.key(tenant), body, session)

    @asynccontextmanager
    async def _flood(self, tenant: str) -> AsyncIterator[list[StreamedTurn]]:
        """``tenant`` sends ``FLOOD_FACTOR`` times A's share, evenly, whatever comes back."""
        done: list[StreamedTurn] = []
        pause_s = 60 / self._config.a_requests_per_minute / FLOOD_FACTOR
        async with _until_left() as group:

            async def one(number: int) -> None:
                words = " ".join(topic_words(1 + number % 6)[: self._config.a_prompt_words])
                done.append(await self._turn(tenant, f"a-{number % 40}", words, self._config.a_tokens, 1.0))

            async def send() -> None:
                number = 0
                while True:
                    group.create_task(one(number))
                    number += 1
                    await asyncio.sleep(pause_s)

            group.create_task(send())
            yield done

    @asynccontextmanager
    async def _thrash(self) -> AsyncIterator[list[StreamedTurn]]:
        """A's sessions send turns of words of all topics, sampled as randomly as may be."""
        done: list[StreamedTurn] = []
        words = [word for topic in range(8) for word in topic_words(topic)]
        async with _until_left() as group:

            async def run(session: int) -> None:
                chooser = random.Random(session)
                while True:
                    prompt = " ".join(chooser.choices(words, k=self._config.a_prompt_words))
                    done.append(await self._turn("thrash", f"t-{session}", prompt, 400, 2.0))

            for session in range(self._config.thrash_sessions):
                group.create_task(run(session))
            yield done

    async def retry_after_is_right(self) -> bool:
        """After A's limits are used up, whoever waits as told is admitted, and who comes over a second early is not."""
        for _ in range(10 * self._config.a_requests_per_minute):
            refused = await self._turn("a", "a-retry", "word", 1, 0)
            if refused.status == 429:
                break
        else:
            return False
        assert refused.retry_after_s is not None
        told_until_s = time.monotonic() + refused.retry_after_s
        await asyncio.sleep(max(0.0, refused.retry_after_s - 1.5))
        early = await self._turn("a", "a-retry", "word", 1, 0)
        await asyncio.sleep(told_until_s - time.monotonic())
        on_time = await self._turn("a", "a-retry", "word", 1, 0)
        return (early.status, on_time.status) == (429, 200)


@asynccontextmanager
async def _until_left() -> AsyncIterator[asyncio.TaskGroup]:
    """A group whose tasks are cancelled when the context is left."""

    class LeftError(Exception):
        pass

    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            yield group
            raise LeftError


def _of_a(turns: list[StreamedTurn]) -> Row:
    statuses = Counter(turn.status for turn in turns)
    return {
        "a_answered": statuses[200],
        "a_refused": statuses[429],
        "a_other": sum(statuses.values()) - statuses[200] - statuses[429],
        "a_tokens": sum(turn.tokens for turn in turns),
        "a_refused_without_retry_after": sum(turn.status == 429 and turn.retry_after_s is None for turn in turns),
    }


async def measure(config: FairnessConfig, runs: int, on_rows: Callable[[list[Row]], None]) -> list[Row]:
    """``runs`` times the conditions in turn, on one service; ``on_rows`` gets what is there after each."""
    rows: list[Row] = []
    limits = httpx.Limits(max_connections=None)
    with temporary_service(lambda directory: service_config(directory, config), TinyModelConfig()) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=120, limits=limits, trust_env=False) as client:
            fairness = Fairness(service, client, config)
            await fairness.warm_up()
            for run in range(1, runs + 1):
                for name in config.conditions:
                    rows.append({"run": run, **await fairness.condition(name)})
                    on_rows(rows)
                rows.append({"run": run, "retry_after_is_right": await fairness.retry_after_is_right()})
    return rows


def summarize(rows: list[Row]) -> Row:
    """Medians over the runs of B's 95th percentiles, over those alone in the same run."""
    counted = [row for row in rows if "condition" in row]
    by = {((row.get("part", 1), row["run"]), row["condition"]): row for row in counted}
    runs = sorted({run for run, _ in by})

    def ratio(condition: str, figure: str) -> float:
        return quantile([by[run, condition][figure] / by[run, "alone"][figure] for run in runs], 0.5)

    measured = [name for name in CONDITIONS[1:] if all((run, name) in by for run in runs)]
    figures = {"ttft_p95_ratio": "ttft_p95_s", "time_per_token_p95_ratio": "time_per_token_p95_s"}
    return {
        "runs": len(runs),
        "least_turns": min(row["turns"] for row in counted),
        **{f"{name}_{ending}": ratio(name, figure) for name in measured for ending, figure in figures.items()},
        "failed_turns_of_b": sum(row["failed"] for row in counted),
        "refused_of_a": sum(row["a_refused"] for row in counted),
        "refused_without_retry_after": sum(row["a_refused_without_retry_after"] for row in counted),
        "retry_after_is_right": all(row["retry_after_is_right"] for row in rows if "retry_after_is_right" in row),
    }


def holds(summary: Row) -> bool:
    """Whether B is served as it shall be, and A is told the truth."""
    return bool(
        summary.get("flood_ttft_p95_ratio", 0.0) <= MOST
        and summary.get("thrash_time_per_token_p95_ratio", 0.0) <= MOST
        and summary["failed_turns_of_b"] == summary["refused_without_retry_after"] == 0
        and (summary["refused_of_a"] > 0 or "flood_ttft_p95_ratio" not in summary)
        and summary["retry_after_is_right"]
    )
