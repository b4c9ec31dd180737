"""What one tenant may try against another and against the service: none of it gets through.

What needs real engines (cached prefixes, processes and ports) is in tests/integration/test_isolation_live.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_in_process import ADMIN_KEY, ANSWER, EVENTS, HEAD, KEY, OTHER_KEY, Service
from ray.exceptions import RayActorError

from services.ingress.errors import ApiError
from services.ingress.sessions import cache_salt, identify

OTHER = {"authorization": f"Bearer {OTHER_KEY}"}


@pytest.fixture
def service() -> Service:
    return Service()


async def sent_by(service: Service, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    """What a replica gets of a turn."""
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat(headers=headers, **fields)).status == 200
    return service.handle.calls[-1].arguments


async def test_another_tenant_s_session_and_user_ids_name_sessions_of_one_s_own(service: Service) -> None:
    first = await sent_by(service, {"x-session-id": "s1"}, user="ann")
    second = await sent_by(service, {**OTHER, "x-session-id": "s1"}, user="ann")
    assert (first["session_key"], second["session_key"]) == ("a/ann/s1", "b/ann/s1")
    assert (first["user_key"], second["user_key"]) == ("a/ann", "b/ann")
    assert (first["tenant"], second["tenant"]) == ("a", "b")


async def test_a_turn_without_user_and_session_is_in_none_that_a_client_can_name(service: Service) -> None:
    keys = [(await sent_by(service, {}))["session_key"] for _ in range(2)]
    assert all(key.startswith("a//!") for key in keys)
    assert len(set(keys)) == 2
    assert (await sent_by(service, {}, user="!1"))["session_key"] == "a/%211/"


@given(st.text(max_size=40), st.from_regex(r"[A-Za-z0-9._:@=+~-]{1,40}", fullmatch=True))
def test_no_id_leaves_its_tenant(user: str, session_id: str) -> None:
    session = identify("b", user, session_id)
    assert session.session_key.split("/")[0] == "b"
    assert session.session_key.count("/") == 2
    assert session.user_key == session.session_key.rpartition("/")[0]


@pytest.mark.parametrize("session_id", ["../a/ann/s1", "a/ann/s1", "s1\n", "", "x" * 129, "s1%2f", "!1"])
async def test_guessed_session_ids_that_are_keys_are_refused(service: Service, session_id: str) -> None:
    reply = await service.chat(headers={**OTHER, "x-session-id": session_id})
    assert reply.status == 400
    assert service.handle.calls == []


async def test_one_salt_of_two_tenants_makes_two_caches(service: Service) -> None:
    salts = {
        json.loads((await sent_by(service, {**tenant, **salt}))["body"])["cache_salt"]
        for tenant in ({}, OTHER)
        for salt in ({}, {"x-cache-salt": "same"}, {"x-cache-salt": cache_salt("salt", "a", None)})
    }
    assert len(salts) == 6, "knowing another's salt opens nothing either"


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "a"},
        {"priority": -5},
        {"vllm_xargs": {"wisp_session": "a/ann/s1"}},
        {"vllm_xargs": {"wisp_weight": 1000}},
        {"weight": 1000},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"chat_template": "{{ 1 }}"},
        {"policy": "os:system"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True},
        {"request_id": "x"},
        {"tenant": "a"},
    ],
)
async def test_a_client_sets_nothing_of_the_inside(service: Service, fields: dict[str, Any]) -> None:
    reply = await service.chat(headers=OTHER, **fields)
    assert (reply.status, reply.error["code"]) == (400, "unknown_parameter")
    assert service.handle.calls == []


async def test_headers_of_the_inside_do_not_reach_a_replica(service: Service) -> None:
    inside = {"x-request-id": "mine", "x-wisp-tenant": "a", "x-data-parallel-rank": "0", "traceparent": "00-1-2-01"}
    arguments = await sent_by(service, {**OTHER, **inside})
    assert set(arguments["headers"]) == {"content-type", "x-request-id"}
    assert arguments["headers"]["x-request-id"].startswith("b-")


async def test_weight_and_share_are_the_operator_s(service: Service) -> None:
    arguments = await sent_by(service, {**OTHER, "x-wisp-weight": "1000"})
    terms = json.loads(arguments["body"])["vllm_xargs"]
    assert terms == {"wisp_session": arguments["session_key"], "wisp_weight": 1.0, "wisp_kv_share": 1.0}


async def test_bodies_and_headers_are_bounded(service: Service) -> None:
    large = await service.request("/v1/completions", [b"x" * 4000] * 50, method="POST")
    assert (large.status, large.error["code"]) == (413, "request_too_large")
    headers = await service.request("/v1/models", headers={**OTHER, "x-filler": "x" * 2000})
    assert (headers.status, headers.error["code"]) == (431, "headers_too_large")
    path = await service.request("/v1/models/" + "x" * 2100, headers=OTHER)
    assert path.status == 431


async def test_a_body_that_trickles_in_has_a_deadline(service: Service) -> None:
    began_s = asyncio.get_running_loop().time()
    reply = await service.request("/v1/completions", [b"{", 0.1, b'"a"', 5.0, b"}"], method="POST")
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    assert asyncio.get_running_loop().time() - began_s < 1.0
    assert service.handle.calls == []


async def test_nothing_is_read_of_a_stranger_s_body(service: Service) -> None:
    reply = await service.request("/v1/completions", [5.0, b"{}"], method="POST", headers={})
    assert reply.status == 401


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_key_prompt_salt_or_id_is_logged_or_measured(
    service: Service, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    good = [HEAD, *EVENTS] if is_stream else [HEAD, json.dumps(ANSWER).encode()]
    service.handle.scripts = [[RayActorError()], good]
    secret = {"x-cache-salt": "my-own-salt", "x-session-id": "my-session"}
    prompt = [{"role": "user", "content": "my secret prompt"}]
    await service.chat(messages=prompt, user="my-user", headers=secret, stream=is_stream)
    await service.chat(messages=[{"role": "user", "content": ["my secret prompt"]}])
    await service.request("/v1/models", headers={"authorization": "Bearer sk-wrong-but-secret"})
    await service.admin("/wisp/tenants", "POST", tenant_id="new")
    shown = (await service.request("/metrics", headers={})).body.decode()
    written = caplog.text + service.telemetry.scrape() + shown
    secrets = (
        KEY,
        ADMIN_KEY,
        "sk-wrong-but-secret",
        "sk-wisp-",
        "secret prompt",
        "my-own-salt",
        "my-session",
        "my-user",
    )
    assert not any(secret in written for secret in secrets)


def test_errors_repeat_no_key() -> None:
    with pytest.raises(ApiError) as refused:
        identify("a", "", KEY + " ")
    assert KEY not in refused.value.body().decode()
