"""A whole service with real engines, as a stranger and as a bad client see it: nothing gets through, nothing breaks."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import redis
from live_service import MODEL, LiveService

from loadtests.service import malformed
from loadtests.service.malformed import send_all
from loadtests.service.streams import StreamsConfig, hold
from wisp_core.tiny_model.tiny_tokenizer import topic_words

SECRET_WORDS = " ".join(reversed(topic_words(3)[:70]))
"""A prompt that no other test of the service begins like."""


@pytest.fixture
def service(live_service: LiveService) -> LiveService:
    live_service.wait_ready()
    return live_service


def cached_tokens(service: LiveService, tenant: str, session: str, **headers: str) -> int:
    with service.client(tenant) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f" {SECRET_WORDS}"}],
            max_tokens=2,
            extra_headers={"x-session-id": session, **headers},
        )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def test_no_tenant_finds_out_by_the_cache_what_another_has_asked(service: LiveService) -> None:
    assert cached_tokens(service, "acme", "one") == 0
    assert cached_tokens(service, "acme", "one") > 0
    # The first time in each cache of its own, on whichever replica: nothing of what acme has asked.
    for salt in ("acme", "", "1", "2"):
        assert cached_tokens(service, "other", f"session-{salt}", **{"x-cache-salt": salt}) == 0


def test_what_vllm_and_the_inside_offer_is_not_there(service: LiveService) -> None:
    paths = ("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/server_info", "/pause", "/docs",
             "/v1/load_lora_adapter", "/tokenize", "/invocations", "/-/routes/x", "/inference/v1/generate")  # fmt: skip
    for path in paths:
        for method in ("GET", "POST"):
            answer = httpx.request(method, service.url + path, headers={"authorization": f"Bearer {service.key()}"})
            assert answer.status_code in (404, 405), path
    for path in ("/wisp/status", "/wisp/tenants"):
        assert httpx.get(service.url + path, headers={"authorization": f"Bearer {service.key()}"}).status_code == 401


def test_a_header_that_is_no_text_breaks_nothing(service: LiveService) -> None:
    for name in (b"x-session-id", b"x-request-id", b"serve-multiplexed-model-id", b"x-other"):
        assert httpx.get(f"{service.url}/readyz", headers=[(name, b"\xe9")]).status_code == 200
    wrong = httpx.get(f"{service.url}/v1/models", headers=[(b"authorization", b"Bearer \xe9")])
    assert wrong.status_code == 401


def test_valkey_takes_a_password_and_listens_on_loopback_only(service: LiveService) -> None:
    (valkey,) = service.processes("valkey-server")
    addresses = [one.laddr for one in valkey.net_connections() if one.status == psutil.CONN_LISTEN]
    assert addresses
    assert {address.ip for address in addresses} == {"127.0.0.1"}
    with redis.Redis(port=addresses[0].port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_no_secret_or_prompt_is_on_a_command_line_or_in_a_log(service: LiveService) -> None:
    cached_tokens(service, "acme", "logged")
    with pytest.raises(openai.BadRequestError):
        cached_tokens(service, "acme", "not a session id")
    lines = [" ".join(process.cmdline()) for process in psutil.Process(service.process.pid).children(recursive=True)]
    folders = {Path(found) for line in lines for found in re.findall(r"/\S+/session_\S+?/logs", line)}
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert files, "Ray's logs lie where its processes are told"
    secrets = [service.key(), service.admin_key, SECRET_WORDS[:40]]
    secrets += [path.read_text().strip() for path in (service.state_dir / "secrets").glob("*.key")]
    written = "\n".join([*lines, service.log(), *(file.read_text(errors="replace") for file in files)])
    assert not [secret for secret in secrets if secret in written]


def test_tenants_change_while_the_service_runs(service: LiveService) -> None:
    tenants, admin = f"{service.url}/wisp/tenants", {"authorization": f"Bearer {service.admin_key}"}

    def status(key: str) -> int:
        return httpx.get(f"{service.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    new = {"tenant_id": "visitor", "weight": 2.0}
    first = httpx.post(tenants, json=new, headers=admin).raise_for_status().json()["key"]
    assert status(first) == 200
    second = httpx.post(f"{tenants}/visitor/rotate", headers=admin).raise_for_status().json()["key"]
    assert (status(first), status(second)) == (401, 200)
    limited = httpx.patch(f"{tenants}/visitor", json={"requests_per_minute": 5}, headers=admin)
    assert limited.json()["requests_per_minute"] == 5
    listed = httpx.get(tenants, headers=admin).json()["tenants"]
    assert "visitor" in {one["tenant_id"] for one in listed}
    assert httpx.delete(f"{tenants}/visitor", headers=admin).status_code == 204
    assert status(second) == 401


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"type": 5}, {"type": "string", "pattern": "a" * 3000 + "{1000}"}])
def test_a_schema_that_cannot_be_followed_is_a_client_s_error(
    service: LiveService, schema: dict[str, Any], is_stream: bool
) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "stream": is_stream,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    answer = httpx.post(
        f"{service.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {service.key()}"},
        timeout=60,
    )
    if answer.status_code == 200:  # The stream had begun when the engine found out.
        events = [line for line in answer.text.splitlines() if line.startswith('data: {"error"')]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "invalid_request_error"
    else:
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_client_that_leaves_frees_its_blocks(service: LiveService) -> None:
    def used_blocks() -> int:
        return sum(one["snapshot"]["kv"]["used_blocks"] for one in service.status()["replicas"])

    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key(), max_retries=0) as client:
        streams = [
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"{i}"}], max_tokens=900, stream=True
            )
            for i in range(4)
        ]
        for stream in streams:
            await anext(aiter(stream))
            await stream.close()
    deadline_s = time.monotonic() + 5
    while await asyncio.to_thread(used_blocks) > 0:
        assert time.monotonic() < deadline_s, "blocks are still held 5 s after the last client has left"
        await asyncio.sleep(0.2)


async def test_a_thousand_malformed_requests_get_no_server_error(service: LiveService) -> None:
    key, host = service.key("other"), service.url.removeprefix("http://")
    row = await send_all(service.url, key, malformed.requests(1000, host, key, MODEL))
    assert row["failures"] == []
    assert row["requests"] == 1000
    assert row["statuses"]["400"] > 300
    assert (await asyncio.to_thread(service.readiness))[0] == 200


async def test_a_hundred_streams_at_once_all_end_well(service: LiveService) -> None:
    config = StreamsConfig(streams=100, hold_s=12.0, max_tokens=30)
    row = await hold(service.url, service.key(), MODEL, config, service.resident_bytes)
    assert (row["failed"], row["errors"]) == (0, [])
    assert row["turns"] >= 100
    assert row["resident_bytes_second_half"] < row["resident_bytes_first_half"] + (200 << 20)
