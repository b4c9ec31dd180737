"""Requests that schemathesis makes of the service's own OpenAPI document, right and wrong ones: no 5xx."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from ingress_in_process import ADMIN_KEY, ANSWER, EVENTS, HEAD, KEY, Service
from schemathesis.generation import GenerationMode

from services.ingress.openapi import openapi
from services.ingress.request_fields import CHAT_PATH, COMPLETIONS_PATH
from services.ingress.sessions import SALT_HEADER, SESSION_HEADER

EXAMPLES = 40
"""Of each operation and mode."""


def operations() -> list[Any]:
    schema = schemathesis.openapi.from_dict(openapi())
    return [result.ok() for result in schema.get_all_operations()]


def fuzz(operation: Any, mode: GenerationMode) -> Counter[int]:
    """Statuses of ``EXAMPLES`` requests of one operation."""
    statuses: Counter[int] = Counter()
    key = ADMIN_KEY if operation.path.startswith("/wisp") else KEY

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        statuses[asyncio.run(status_of(case, key))] += 1

    send()
    return statuses


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_the_document_has_every_header_that_a_turn_may_carry(path: str) -> None:
    parameters = openapi()["paths"][path]["post"]["parameters"]
    assert {one["name"] for one in parameters} == {SESSION_HEADER, SALT_HEADER}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_no_request_of_the_document_gets_a_server_error(mode: GenerationMode) -> None:
    statuses: Counter[int] = Counter()
    for operation in operations():
        # What takes no body cannot be asked wrongly.
        if operation.body or mode is GenerationMode.POSITIVE:
            statuses += fuzz(operation, mode)
    # Of the scripted service no engine is up: 503 is what /readyz has to say.
    assert not [status for status in statuses if status >= 500 and status != 503], statuses
    assert sum(statuses.values()) >= 5 * EXAMPLES
    assert statuses[400 if mode is GenerationMode.NEGATIVE else 200] > EXAMPLES


async def status_of(case: Any, key: str) -> int:
    """Send ``case`` to an ingress whose replica answers anything well."""
    service = Service(requests_per_minute=10_000, tokens_per_minute=1_000_000_000)
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body, default=str).encode()
    is_stream = isinstance(case.body, dict) and case.body.get("stream") is True
    if isinstance(case.body, dict) and "model" in case.body:
        body = json.dumps({**case.body, "model": "tiny"}, default=str).encode()
    service.handle.scripts = [[HEAD, *EVENTS] if is_stream else [HEAD, json.dumps(ANSWER).encode()]]
    headers = {str(k): str(v).encode("latin-1", "replace").decode("latin-1") for k, v in (case.headers or {}).items()}
    headers["authorization"] = f"Bearer {key}"
    path = case.formatted_path if case.path_parameters else case.path
    return (await service.request(path, body, method=case.method, headers=headers)).status


def test_the_document_names_every_route_and_no_other() -> None:
    service = Service()
    routes = {(route.path.replace(":path", ""), method) for route in service.app.routes for method in route.methods}
    shown = {(path, method.upper()) for path, methods in openapi()["paths"].items() for method in methods}
    assert shown == {(path, method) for path, method in routes if method != "HEAD"}
