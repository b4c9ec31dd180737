"""A workload as numbers: who asks when, with how long a prompt, for how long an answer. No prompts.

A *client* is one stream of turns, one after another; its turns belong to *sessions*, which share a prefix. One rule
covers open and closed loops: a turn begins at ``max(at_s, end of the client's previous turn + think_s)``. A replay of
arrivals has only ``at_s``, a closed loop only ``think_s`` (and the client's start).

With ``has_barriers`` a phase begins when every turn of the phases before has ended, and ``at_s`` counts from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wisp_core.errors import ConfigurationError

FORMAT = 1
TURN = np.dtype(
    [
        ("client", np.int32),
        ("session", np.int32),
        ("user", np.int32),
        ("tenant", np.int16),
        ("topic", np.int16),
        ("phase", np.int16),
        ("at_s", np.float64),
        ("think_s", np.float64),
        ("prompt_tokens", np.int32),
        ("prefix_tokens", np.int32),
        ("output_tokens", np.int32),
        ("ttft_s", np.float64),
        ("duration_s", np.float64),
        ("replica", np.int16),
    ]
)
_MEASURED = ("ttft_s", "duration_s")


class TraceTurn(NamedTuple):
    """One turn; numbers of client, session, user, tenant and topic are small and arbitrary."""

    client: int
    session: int
    user: int
    tenant: int
    topic: int
    phase: int
    at_s: float
    """Not before this, seconds from the trace's start (with barriers: from the phase's)."""
    think_s: float
    """Not before this long after the end of the client's previous turn, seconds."""
    prompt_tokens: int
    """The whole prompt, history included."""
    prefix_tokens: int
    """Part of it that an earlier turn of the session has left in a prefix cache, if it is still there."""
    output_tokens: int
    ttft_s: float = math.nan
    """As measured where the trace was recorded; NaN: not measured."""
    duration_s: float = math.nan
    """Likewise, from arrival to end."""
    replica: int = -1
    """Where it ran when it was recorded; -1: not known."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Turns ``[n]`` of `TURN`, those of a client together and in order, and what the numbers in them mean."""

    turns: npt.NDArray[np.void]
    tenants: tuple[str, ...] = ("tenant",)
    phases: tuple[str, ...] = ("all",)
    has_barriers: bool = False
    source: str = ""

    @classmethod
    def of(cls, turns: Iterable[TraceTurn], **names: Any) -> Trace:
        """From turns in any order of clients; turns of one client in their order."""
        array = np.array([tuple(turn) for turn in turns], dtype=TURN)
        return cls(array[np.argsort(array["client"], kind="stable")], **names)

    def __post_init__(self) -> None:
        turns, problems = self.turns, []
        if len(turns) == 0:
            problems.append("it has no turns")
        elif np.any(np.diff(turns["client"]) < 0):
            problems.append("turns of one client are not together")
        else:
            limits = (("tenant", len(self.tenants)), ("phase", len(self.phases)))
            problems += [f"a {name} has no name" for name, num in limits if turns[name].max() >= num]
            bounds = (
                ("prompt_tokens", turns["prompt_tokens"] < 1),
                ("output_tokens", turns["output_tokens"] < 1),
                ("prefix_tokens", (turns["prefix_tokens"] < 0) | (turns["prefix_tokens"] > turns["prompt_tokens"])),
                ("at_s", ~(turns["at_s"] >= 0)),
                ("think_s", ~(turns["think_s"] >= 0)),
            )
            problems += [f"{name} is out of range" for name, is_wrong in bounds if np.any(is_wrong)]
        if problems:
            raise ConfigurationError(f"trace {self.source or '(unnamed)'}: {'; '.join(problems)}")

    def __len__(self) -> int:
        return len(self.turns)

    def __iter__(self) -> Iterator[TraceTurn]:
        """Client by client, each in order."""
        return (TraceTurn(*row) for row in self.turns.tolist())

    @property
    def num_clients(self) -> int:
        """Streams of turns."""
        return len(np.unique(self.turns["client"]))

    @property
    def num_sessions(self) -> int:
        """Conversations."""
        return len(np.unique(self.turns["session"]))

    @property
    def num_topics(self) -> int:
        """Kinds of work with an expert working set of their own."""
        return int(self.turns["topic"].max()) + 1

    @property
    def has_measurements(self) -> bool:
        """Whether every turn says how long it took."""
        return bool(np.all(np.isfinite(self.turns["duration_s"])))

    def longest_tokens(self) -> int:
        """Most tokens, prompt and answer, of a turn."""
        return int((self.turns["prompt_tokens"] + self.turns["output_tokens"]).max())

    def cut(self, max_model_len: int) -> Trace:
        """Without the turns that ``max_model_len`` tokens cannot hold. Raises ConfigurationError if none is left."""
        fits = self.turns["prompt_tokens"] + self.turns["output_tokens"] <= max_model_len
        return self if fits.all() else Trace(self.turns[fits], **self._names())

    def phase(self, number: int) -> Trace:
        """The turns of one phase alone."""
        return Trace(self.turns[self.turns["phase"] == number], **self._names())

    def _names(self) -> dict[str, Any]:
        return {
            "tenants": self.tenants,
            "phases": self.phases,
            "has_barriers": self.has_barriers,
            "source": self.source,
        }


@dataclass
class _Lines:
    header: dict[str, Any] = field(default_factory=dict)
    rows: list[TraceTurn] = field(default_factory=list)


def write_trace(path: Path, trace: Trace) -> None:
    """Write JSON lines: a header, then a turn a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for line in trace_lines(trace):
            file.write(line + "\n")


def trace_lines(trace: Trace) -> Iterator[str]:
    """What `write_trace` writes."""
    header = {name: list(value) if isinstance(value, tuple) else value for name, value in trace._names().items()}
    yield json.dumps({"wisp_trace": FORMAT, **header})
    for turn in trace:
        fields = turn._asdict()
        for name in _MEASURED:
            if math.isnan(fields[name]):
                del fields[name]
        yield json.dumps({"turn": fields})


def parse_trace(lines: Iterable[str], source: str) -> Trace:
    """Read what `write_trace` wrote; other kinds of lines in between are left out. Raises ConfigurationError."""
    read = _Lines()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _take_line(read, line, f"{source}, line {number}")
    if not read.header:
        raise ConfigurationError(f"{source} is no trace: its first line has no 'wisp_trace'")
    return Trace.of(
        read.rows,
        tenants=tuple(read.header["tenants"]),
        phases=tuple(read.header["phases"]),
        has_barriers=bool(read.header["has_barriers"]),
        source=read.header.get("source") or source,
    )


def _take_line(read: _Lines, line: str, where: str) -> None:
    try:
        value = json.loads(line)
        if not read.header:
            if value.get("wisp_trace") != FORMAT:
                raise ConfigurationError(f"{where}: not a trace of format {FORMAT}")
            read.header = {"tenants": value["tenants"], "phases": value["phases"], **value}
        elif "turn" in value:
            read.rows.append(TraceTurn(**value["turn"]))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{where}: {error}") from error
