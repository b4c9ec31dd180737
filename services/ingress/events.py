"""Server-sent events of one streamed answer: usage read, counted, and taken out if the client did not ask for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.ingress.errors import ApiError, from_engine


@dataclass(frozen=True)
class Usage:
    """Tokens of one turn, as the engine counted them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, answer: object) -> Usage | None:
        """The ``usage`` of a parsed answer or event, if it has one."""
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict):
            return None
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )


class EventFilter:
    """Passes the events of one stream through; pieces may cut events anywhere.

    The engine says in each event how far it is, so that a stream that ends early is charged by tokens; the client
    sees none of that.
    """

    def __init__(self, *, keeps_usage: bool, has_grammar: bool = False) -> None:
        """``keeps_usage``: whether the closing usage event goes to the client; ``has_grammar`` as in from_engine."""
        self._keeps_usage = keeps_usage
        self._has_grammar = has_grammar
        self._rest = b""
        self._prompt_tokens = 0
        self._completion_tokens: dict[int, int] = {}
        self.usage: Usage | None = None
        self.error: ApiError | None = None

    @property
    def so_far(self) -> Usage:
        """Tokens of the events that have passed, all choices together."""
        return Usage(self._prompt_tokens, 0, sum(self._completion_tokens.values()))

    def feed(self, piece: bytes) -> bytes:
        """The complete events of what came so far, as they go to the client."""
        whole, separator, self._rest = (self._rest + piece).rpartition(b"\n\n")
        if not separator:
            return b""
        passed = (self._for_client(event) for event in whole.split(b"\n\n"))
        return b"".join(event + b"\n\n" for event in passed if event is not None)

    def rest(self) -> bytes:
        """What came after the last complete event."""
        return self._rest

    def _for_client(self, event: bytes) -> bytes | None:
        if event.startswith(ERROR_START):
            self.error = error_of(event, has_grammar=self._has_grammar)
            return self.error.event().removesuffix(b"\n\n")
        answer = _parsed(event)
        usage = Usage.of(answer)
        if usage is None:
            return event
        choices = answer.get("choices")
        if not choices:
            self.usage = usage
            return event if self._keeps_usage else None
        self._prompt_tokens = max(self._prompt_tokens, usage.prompt_tokens)
        self._completion_tokens[choices[0].get("index", 0)] = usage.completion_tokens
        del answer["usage"]
        return b"data: " + json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


ERROR_START = b'data: {"error"'
"""How an event begins that ends a stream with an error."""


def _parsed(event: bytes) -> dict[str, Any]:
    """The JSON object of an event; empty when it holds none."""
    try:
        answer = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def error_of(event: bytes, *, has_grammar: bool) -> ApiError:
    """The engine's error in an event as a client may see it, like one that comes before a stream begins."""
    event = event.partition(b"\n\n")[0]
    error = _parsed(event).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 500 else 500
    return from_engine(status, event.removeprefix(b"data: "), has_grammar=has_grammar)
