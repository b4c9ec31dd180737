"""Requests that schemathesis makes of the service's own OpenAPI document, half of them wrong on purpose."""

from __future__ import annotations

import json
from typing import Any

from loadtests.service.malformed import RawRequest, post
from services.ingress.openapi import openapi

PATHS = ("/v1/chat/completions", "/v1/completions")


def requests(count: int, host: str, key: str, model: str) -> list[RawRequest]:
    """About ``count`` requests to the endpoints that take turns, always the same. Needs the development packages."""
    from schemathesis import openapi as documents
    from schemathesis.generation import GenerationMode

    schema: Any = documents.from_dict(openapi())
    operations = [result.ok() for result in schema.get_all_operations()]
    found: list[RawRequest] = []
    for operation in (one for one in operations if one.path in PATHS):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = _cases(operation.as_strategy(generation_mode=mode), -(-count // 4))
            found += [_raw(case, host, key, model) for case in cases]
    return found


def _cases(strategy: Any, count: int) -> list[Any]:
    from hypothesis import HealthCheck, Phase, given, settings

    cases: list[Any] = []

    def keep(case: Any) -> None:
        cases.append(case)

    plan: Any = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    test: Any = given(strategy)(keep)  # type: ignore[no-untyped-call]  # hypothesis types decorated tests only
    plan(test)()
    return cases


def _raw(case: Any, host: str, key: str, model: str) -> RawRequest:
    body = case.body
    if isinstance(body, dict):
        # Else nearly every request would end at the model's name, and the others could ask for long answers.
        body = {**body, "model": model}
        for field in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(field), int) and not isinstance(body[field], bool):
                body[field] = min(body[field], 1)
    data = body if isinstance(body, bytes) else json.dumps(body, default=str).encode()
    return RawRequest(post(case.path, host, key, data, "Content-Type: application/json"))
