"""Requests that no client should send: broken JSON, fields of wrong kinds, broken HTTP. None may get a 5xx.

Seeded: equal seeds give equal requests. Those that happen to be valid ask for one token.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loadtests.rows import Row
from loadtests.service.running import RunningService, temporary_service
from loadtests.service.streams import MODEL, MOST_GROWTH, StreamsConfig, service_config

PATHS = ("/v1/chat/completions", "/v1/completions")
TENTHS = 10
_OTHER_PATHS = ("/", "/v1/models", "/v1/models/%00", "/v1/embeddings", "/wisp/status", "/wisp/tenants", "/metrics/x")
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, -0.5, 2**63, 2**200, "", "\u0000", "\ud7ff", "x" * 5000, [], {}, [[]], [None], {"a": {}},
    [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}], {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "pattern": "(a{999}){999}"}}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
    {"include_usage": True}, {"5": 500}, {"x": 1},
)  # fmt: skip
_FIELDS = (
    "model", "messages", "prompt", "temperature", "top_p", "n", "stop", "stream", "stream_options", "seed", "user",
    "presence_penalty", "logit_bias", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tools",
    "tool_choice", "response_format", "metadata", "echo", "priority", "cache_salt", "vllm_xargs", "guided_json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MalformedConfig:
    """One run."""

    name: str = "malformed"
    requests: int = 10_000


@dataclass(frozen=True)
class RawRequest:
    """Bytes for the wire."""

    data: bytes
    ends_early: bool = False
    """Whether the connection is closed after them, without waiting for an answer."""


def requests(count: int, host: str, key: str, model: str, seed: int = 0) -> Iterator[RawRequest]:
    """``count`` requests of all sorts."""
    chooser = random.Random(seed)
    for _ in range(count):
        kind = chooser.choices((_json, _bytes, _http), weights=(6, 2, 2))[0]
        yield kind(chooser, host, key, model)


def post(path: str, host: str, key: str, body: bytes, *extra: str) -> bytes:
    """A whole POST request; ``extra`` are header lines."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {key}", "Connection: close", *extra]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body


def _valid(path: str, model: str) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {"model": model, "max_tokens": 1, **prompt}


def _json(chooser: random.Random, host: str, key: str, model: str) -> RawRequest:
    """A valid request with some fields of another kind, or left out."""
    path = chooser.choice(PATHS)
    body = _valid(path, model)
    for _ in range(chooser.randint(1, 3)):
        field = chooser.choice(_FIELDS)
        if chooser.random() < 0.2:
            body.pop(field, None)
        elif field not in ("max_tokens", "max_completion_tokens") or chooser.random() < 0.5:
            body[field] = chooser.choice(_ODD)
    if not isinstance(body.get("max_tokens"), bool | str | list | dict | float | type(None)):
        body["max_tokens"] = min(body["max_tokens"], 1)
    return RawRequest(post(path, host, key, json.dumps(body).encode(), "Content-Type: application/json"))


def _bytes(chooser: random.Random, host: str, key: str, model: str) -> RawRequest:
    """Text that is no JSON, or no text, or deeper than anybody needs."""
    path = chooser.choice(PATHS)
    text = json.dumps(_valid(path, model)).encode()
    cut = chooser.randrange(len(text))
    depth = chooser.choice((50, 500, 100_000))
    body = chooser.choice(
        (
            text[:cut],
            text[:cut] + chooser.randbytes(5) + text[cut:],
            text[:-1] + b', "seed": ' + b"9" * 5000 + b"}",
            b'{"messages": ' + b"[" * depth + b"]" * depth + b"}",
            text.replace(b'"hi"', b'"\\ud800"'),
            text.replace(b"1", b"NaN"),
            b"\xff\xfe" + text.decode().encode("utf-16-le"),
            b"",
        )
    )
    return RawRequest(post(path, host, key, body))


def _http(chooser: random.Random, host: str, key: str, model: str) -> RawRequest:
    """Broken or unusual HTTP."""
    path = chooser.choice(PATHS)
    good = post(path, host, key, json.dumps(_valid(path, model)).encode())
    noise = "".join(chooser.choices(string.printable[:94], k=30))
    choices = (
        RawRequest(good.replace(b"Content-Length: ", b"Content-Length: -")),
        RawRequest(good.replace(b"HTTP/1.1", b"HTTP/9.9", 1)),
        RawRequest(good[: chooser.randrange(20, len(good))], ends_early=True),
        RawRequest(post(path, host, key + noise, b"{}")),
        RawRequest(post(path, host, key, b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked")),
        RawRequest(post(path, host, key, b"{}", f"x-session-id: {noise}", "x-cache-salt: " + "s" * 300)),
        RawRequest(post(path, host, key, b"{}", "x-session-id: NO_TEXT").replace(b"NO_TEXT", b"\xe9")),
        RawRequest(post(path, host, key, b"{}", "x-filler: " + "x" * 20_000)),
        RawRequest(post(path + "/../" + "a" * 3000, host, key, b"{}")),
        RawRequest(post(chooser.choice(_OTHER_PATHS), host, key, b"{}")),
        RawRequest(good.replace(b"POST", chooser.choice(_METHODS).encode(), 1)),
        RawRequest(chooser.randbytes(60) + b"\r\n\r\n"),
    )
    return chooser.choice(choices)


async def send_all(url: str, key: str, batch: Iterable[RawRequest], *, at_once: int = 16) -> Row:
    """Send all requests of ``batch``: a row with the statuses that came, and each 5xx with its request."""
    host, port = _address(url)
    statuses: Counter[str] = Counter()
    failures: list[str] = []
    queue = iter(batch)

    async def work() -> None:
        for request in queue:
            status = await _send(host, port, request)
            statuses[status] += 1
            if status.startswith("5") or status == "silent":
                failures.append(f"{status}: {request.data[:600]!r}".replace(key, "KEY"))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return {"requests": statuses.total(), "statuses": dict(sorted(statuses.items())), "failures": failures}


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


async def _send(host: str, port: int, request: RawRequest) -> str:
    """The status; "closed" without one, "silent" if nothing came for a minute."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request.data)
        await writer.drain()
        if request.ends_early:
            return "left"
        line = await asyncio.wait_for(reader.readline(), 60)
        await asyncio.wait_for(reader.read(), 60)
    except TimeoutError:
        return "silent"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()
    return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"


def measure(config: MalformedConfig, on_row: Callable[[Row], None]) -> Row:
    """Requests to a service of its own, half of them schemathesis's, and its memory after each tenth: a row.

    ``on_row`` gets it after each tenth. Needs the development packages.
    """
    from loadtests.service import described

    with temporary_service(lambda directory: service_config(directory, StreamsConfig(streams=64))) as service:
        host, key, half = service.url.removeprefix("http://"), service.key("acme"), config.requests // 2
        batch = [*described.requests(half, host, key, MODEL)]
        batch += requests(config.requests - half, host, key, MODEL)
        random.Random(0).shuffle(batch)
        row = _send_in_tenths(service, key, batch, on_row)
        if (ready := service.readiness()[0]) != 200:
            row["num_failures"] += 1
            row["failures"].append(f"not ready afterwards: {ready}")
    return row


def _send_in_tenths(service: RunningService, key: str, batch: list[RawRequest], on_row: Callable[[Row], None]) -> Row:
    statuses: Counter[str] = Counter()
    failures: list[str] = []
    resident_bytes: list[int] = []
    anonymous_bytes: list[dict[str, int]] = []
    for tenth in range(TENTHS):
        part = batch[len(batch) * tenth // TENTHS : len(batch) * (tenth + 1) // TENTHS]
        sent = asyncio.run(send_all(service.url, key, part))
        statuses.update(sent["statuses"])
        failures += sent["failures"]
        resident_bytes.append(service.resident_bytes())
        anonymous_bytes.append(service.anonymous_bytes())
        row = {
            "requests": statuses.total(),
            "statuses": dict(sorted(statuses.items())),
            "num_failures": len(failures),
            "failures": failures[:20],
            "resident_bytes_after_each_tenth": resident_bytes,
            "anonymous_bytes_after_each_tenth": {
                name: [one.get(name, 0) for one in anonymous_bytes] for name in sorted(set().union(*anonymous_bytes))
            },
        }
        on_row(row)
    return row


def summarize(row: Row) -> Row:
    """Failures, and how much memory grew after the first tenth and in the second half, if it came to that."""
    resident_bytes = row["resident_bytes_after_each_tenth"]
    summary = {
        "requests": row["requests"],
        "failures": row["num_failures"],
        "resident_bytes": resident_bytes[-1],
        "growth_bytes": resident_bytes[-1] - resident_bytes[0],
    }
    if len(resident_bytes) < TENTHS:
        return summary
    halfway = TENTHS // 2 - 1
    anonymous_growth_bytes = {
        name: values[-1] - values[halfway] for name, values in row["anonymous_bytes_after_each_tenth"].items()
    }
    return summary | {
        "growth_bytes_second_half": resident_bytes[-1] - resident_bytes[halfway],
        "anonymous_growth_bytes_second_half": sum(anonymous_growth_bytes.values()),
        "anonymous_growth_bytes_second_half_by_part": anonymous_growth_bytes,
    }


def holds(summary: Row) -> bool:
    """Whether nothing failed, and memory hardly grew once each kind of request had come often."""
    return bool(
        summary["failures"] == 0 and summary["growth_bytes_second_half"] <= MOST_GROWTH * summary["resident_bytes"]
    )
