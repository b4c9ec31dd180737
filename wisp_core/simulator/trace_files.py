"""Reads a workload from a file: WiSP's own traces, and public request traces in three formats.

| format | recognised by | time | tokens | session |
|---|---|---|---|---|
| WiSP | first line has ``wisp_trace`` | seconds | prompt, prefix, output | yes |
| Azure LLM inference (CSV) | ``TIMESTAMP,ContextTokens,GeneratedTokens`` | date and time | both | none |
| BurstGPT (CSV) | ``Timestamp,...,Request tokens,Response tokens`` | seconds | both | ``Session ID``, if there |
| Mooncake (JSON lines) | ``timestamp, input_length, output_length`` | milliseconds | both | from ``hash_ids`` |

Public traces are replayed by arrival. Where sessions are known, a turn's prefix is what the session's last turn left:
its prompt and answer, if the prompt grew by at least that; in Mooncake's format the hashed blocks say so themselves.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wisp_core.errors import ConfigurationError
from wisp_core.simulator.trace import Trace, TraceTurn, parse_trace

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens behind one of Mooncake's ``hash_ids``."""

_AZURE = ("timestamp", "contexttokens", "generatedtokens")
_BURST = ("timestamp", "request tokens", "response tokens")


@dataclass(frozen=True)
class _Request:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, max_turns: int | None = None) -> Trace:
    """Read ``path`` in any known format, the first ``max_turns`` requests of a public one.

    Raises ConfigurationError that names the line, or the formats when it is none of them.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"trace {path}: {error}") from error
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        if '"wisp_trace"' in first:
            return parse_trace(lines, str(path))
        requests = _parse_all((line for line in lines if line.strip()), _mooncake, str(path), first_line=1)
        return _open_loop(requests, str(path), max_turns)
    columns = {name.strip().lower() for name in first.split(",")}
    if columns.issuperset(_AZURE):
        return _open_loop(_read_csv(lines, _azure, str(path)), str(path), max_turns)
    if columns.issuperset(_BURST):
        return _open_loop(_read_csv(lines, _burst, str(path)), str(path), max_turns)
    raise ConfigurationError(
        f"trace {path}: none of the known formats: WiSP's JSON lines, Mooncake's JSON lines (timestamp, input_length, "
        "output_length), CSV with TIMESTAMP,ContextTokens,GeneratedTokens or Timestamp,Request tokens,Response tokens"
    )


def _read_csv(lines: list[str], parse: Callable[[Mapping[str, str]], _Request], source: str) -> list[_Request]:
    rows = csv.DictReader(line for line in lines if line.strip())
    assert rows.fieldnames is not None
    rows.fieldnames = [name.strip().lower() for name in rows.fieldnames]
    return _parse_all(rows, parse, source, first_line=2)


def _parse_all(rows: Iterable[Any], parse: Callable[[Any], _Request], source: str, first_line: int) -> list[_Request]:
    found = []
    for number, row in enumerate(rows, start=first_line):
        try:
            request = parse(row)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"trace {source}, line {number}: {type(error).__name__} {error}") from error
        if request.prompt_tokens > 0 and request.output_tokens > 0:  # others failed where they were recorded
            found.append(request)
    return found


def _azure(row: Mapping[str, str]) -> _Request:
    whole, _, fraction = row["timestamp"].strip().partition(".")
    # Seven decimals in the first release, an offset in the second: Python's parser takes six and its own form.
    digits = fraction.partition("+")[0].rstrip("Z")
    at = datetime.fromisoformat(whole.partition("+")[0].rstrip("Z")).replace(tzinfo=UTC)
    at_s = at.timestamp() + (float(f"0.{digits}") if digits else 0.0)
    return _Request(at_s, int(row["contexttokens"]), int(row["generatedtokens"]))


def _burst(row: Mapping[str, str]) -> _Request:
    session = (row.get("session id") or "").strip() or None
    return _Request(float(row["timestamp"]), int(row["request tokens"]), int(row["response tokens"]), session)


def _mooncake(line: str) -> _Request:
    row: Mapping[str, Any] = json.loads(line)
    return _Request(
        float(row["timestamp"]) / 1e3,
        int(row["input_length"]),
        int(row["output_length"]),
        hash_ids=tuple(row.get("hash_ids", ())),
    )


class _Sessions:
    """Who a request continues, and how much of its prompt was there before."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._left: dict[int, int] = {}  # tokens that a session's last turn left behind
        self._of_block: dict[int, int] = {}
        self._num = 0

    def of(self, request: _Request) -> tuple[int, int]:
        """``(session, prefix tokens)``."""
        if request.hash_ids:
            return self._by_blocks(request)
        if request.session is None:
            return self._new(), 0
        session = self._numbers.setdefault(request.session, self._num)
        if session == self._num:
            self._new()
        left = self._left.get(session, 0)
        self._left[session] = request.prompt_tokens + request.output_tokens
        return session, left if left <= request.prompt_tokens else 0

    def _by_blocks(self, request: _Request) -> tuple[int, int]:
        known = 0
        while known < len(request.hash_ids) and request.hash_ids[known] in self._of_block:
            known += 1
        # A first block is a system prompt that everybody has; a longer chain is a conversation.
        session = self._of_block[request.hash_ids[known - 1]] if known > 1 else self._new()
        for block in request.hash_ids[known:]:
            self._of_block[block] = session
        return session, min(known * MOONCAKE_BLOCK_TOKENS, request.prompt_tokens - 1) if known > 1 else 0

    def _new(self) -> int:
        self._num += 1
        return self._num - 1


def _open_loop(requests: list[_Request], source: str, max_turns: int | None) -> Trace:
    """Turns at their own times; those of a session still wait for each other."""
    requests = sorted(requests, key=lambda request: request.at_s)[:max_turns]
    sessions, turns = _Sessions(), []
    for request in requests:
        session, prefix_tokens = sessions.of(request)
        turns.append(
            TraceTurn(
                client=session,
                session=session,
                user=session,
                tenant=0,
                topic=0,
                phase=0,
                at_s=request.at_s - requests[0].at_s,
                think_s=0.0,
                prompt_tokens=request.prompt_tokens,
                prefix_tokens=prefix_tokens,
                output_tokens=request.output_tokens,
            )
        )
    return Trace.of(turns, source=source)
