"""Errors as OpenAI's API gives them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from wisp_core.store.interface import Admission, Limit


class ApiError(Exception):
    """An answer other than success. The message goes to the client: no keys, prompts or internals in it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    def body(self) -> bytes:
        """The JSON answer."""
        return json.dumps({"error": self.error}).encode()

    def event(self) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client has to change the request."""
    return ApiError(400, message, param=param, code=code)


def client_gone() -> ApiError:
    """499: nobody reads it, but it is counted."""
    return ApiError(499, "The request ended early.")


def invalid_key() -> ApiError:
    """401: no key, or one that belongs to nobody."""
    return ApiError(
        401,
        "Incorrect API key provided.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def unknown_model(name: str) -> ApiError:
    """404: another model than the one served."""
    message = f"The model `{name[:256]}` does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, retry_after_s: float = 1.0) -> ApiError:
    """503: nothing was done; the same request may succeed later."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="service_unavailable",
        headers={"retry-after": _whole_seconds(retry_after_s)},
    )


def rate_limited(admission: Admission, limit: int, requested: int) -> ApiError:
    """429: a limit of the tenant. Without Retry-After when waiting does not help."""
    assert admission.which is not None
    unit = {Limit.REQUESTS: "requests per min", Limit.TOKENS: "tokens per min", Limit.TURNS: "concurrent turns"}
    message = f"Rate limit reached on {unit[admission.which]}: limit {limit}, requested {requested}."
    kind = "tokens" if admission.which is Limit.TOKENS else "requests"
    if admission.retry_after_s is None:
        too_large = f"Request too large on {unit[admission.which]}: limit {limit}, requested {requested}."
        return ApiError(429, too_large, kind=kind, code="rate_limit_exceeded")
    wait = _whole_seconds(admission.retry_after_s)
    return ApiError(
        429,
        f"{message} Please try again in {wait}s.",
        kind=kind,
        code="rate_limit_exceeded",
        headers={"retry-after": wait},
    )


def _whole_seconds(seconds: float) -> str:
    """Retry-After takes whole seconds; rounded up, so that a client that waits as told is admitted."""
    return str(max(1, math.ceil(seconds - 1e-3)))


GENERATION_FAILED = "Internal server error"
"""What vLLM says of a turn that its engine ended by an error, while the engine itself goes on."""


def from_engine(status: int, body: bytes, *, has_grammar: bool = False) -> ApiError:
    """vLLM's error answer in OpenAI's form; its message is kept for client errors only.

    ``has_grammar``: the turn was to follow a schema. Some schemas pass vLLM's checks and fail only when the engine
    compiles them, which nothing but that message tells.
    """
    if status == 500 and has_grammar and _engine_error(body).get("message") == GENERATION_FAILED:
        return bad_request("The JSON schema cannot be compiled into a grammar.", code="invalid_json_schema")
    if status >= 500:
        return (
            unavailable("The server is overloaded or restarting. Please retry.")
            if status == 503
            else ApiError(status, "The server had an error while processing your request.", kind="server_error")
        )
    error = _engine_error(body)
    message = str(error.get("message", "The request was refused."))
    param = error.get("param")
    is_too_long = "maximum context length" in message or "max_model_len" in message
    return ApiError(
        status,
        message,
        code="context_length_exceeded" if is_too_long else None,
        param=param if isinstance(param, str) else None,
    )


def _engine_error(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    return error if isinstance(error, dict) else {}
