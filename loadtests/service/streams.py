"""Many streams at once, held open: every one goes on to its end, and the service's memory stays bounded."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.rows import Row, quantile
from loadtests.service.running import service_file, temporary_service, tenant
from loadtests.service.stream_client import StreamedTurn, stream_chat
from wisp_core.errors import ConfigurationError

MODEL = "tiny"
MOST_GROWTH = 0.05
"""Part of all memory that may come in the second half of a run."""
_OTHER_FILES = 200


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """One run."""

    name: str = "streams"
    streams: int = 1000
    hold_s: float = 120.0
    """Each connection sends turns until this has passed, and then finishes its last."""
    max_tokens: int = 200


def service_config(directory: Path, config: StreamsConfig) -> dict[str, Any]:
    """Two replicas that run every stream at once."""
    seqs = -(-config.streams * 6 // 10)
    replica = {
        "count": 2,
        "vram_budget_bytes": 640 << 20,
        "activation_bytes": 64 << 20,
        "initial_cap": 16,
        "max_ongoing_turns": 2 * seqs,
        "engine": {"max_model_len": 512, "max_num_seqs": seqs, "max_num_batched_tokens": 2048, "block_size": 32},
    }
    tenants = [tenant(directory, "acme", max_concurrent_turns=10 * config.streams)]
    return service_file("streams", directory, MODEL, replica, tenants)


async def hold(url: str, key: str, model: str, config: StreamsConfig, resident_bytes: Callable[[], int]) -> Row:
    """Keep ``config.streams`` connections streaming for ``config.hold_s`` against any service: a row."""
    turns: list[StreamedTurn] = []
    samples: list[int] = []
    until_s = time.monotonic() + config.hold_s
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def run(client: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < until_s:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"stream {number}"}],
                "max_tokens": config.max_tokens,
                "temperature": 1,
                "seed": number,
            }
            turns.append(await stream_chat(client, key, body, f"stream-{number}"))

    async def sample() -> None:
        while time.monotonic() < until_s:
            samples.append(await asyncio.to_thread(resident_bytes))
            await asyncio.sleep(2.0)

    async with (
        httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(sample())
        for number in range(config.streams):
            group.create_task(run(client, number))
    half = len(samples) // 2
    good = [turn for turn in turns if turn.error is None and turn.pieces_s]
    return {
        "streams": config.streams,
        "turns": len(turns),
        "failed": sum(turn.error is not None for turn in turns),
        "errors": sorted({turn.error for turn in turns if turn.error is not None})[:5],
        "tokens": sum(turn.tokens for turn in turns),
        "ttft_p50_s": quantile([turn.ttft_s for turn in good], 0.5),
        "ttft_p99_s": quantile([turn.ttft_s for turn in good], 0.99),
        "resident_bytes_first_half": max(samples[: half or 1]),
        "resident_bytes_second_half": max(samples[half:]),
        "resident_bytes_over_time": samples[:: max(1, len(samples) // 12)],
    }


def allow_connections(count: int) -> None:
    """Let this process hold ``count`` connections. Raises ConfigurationError."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < count + _OTHER_FILES:
        raise ConfigurationError(f"--streams {count}: this process may open {most} files only; see `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def measure(config: StreamsConfig) -> list[Row]:
    """One row, on a service of its own. Raises ConfigurationError where so many connections are not allowed."""
    allow_connections(config.streams)
    with temporary_service(lambda directory: service_config(directory, config)) as service:
        return [asyncio.run(hold(service.url, service.key("acme"), MODEL, config, service.resident_bytes))]


def summarize(rows: list[Row]) -> Row:
    """Failures, and how much memory grew from the first half of the run to the second."""
    (row,) = rows
    growth_bytes = row["resident_bytes_second_half"] - row["resident_bytes_first_half"]
    return {key: row[key] for key in ("streams", "turns", "failed", "tokens", "resident_bytes_second_half")} | {
        "growth_bytes": growth_bytes
    }


def holds(summary: Row) -> bool:
    """Whether every stream ended well, and memory hardly grew once all were there."""
    return bool(
        summary["failed"] == 0
        and summary["turns"] >= summary["streams"]
        and summary["growth_bytes"] <= MOST_GROWTH * summary["resident_bytes_second_half"]
    )
