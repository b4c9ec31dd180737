"""The ingress on real Ray Serve over HTTP, with small scripted replicas behind the real router and real Valkey."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig

from services.config import HttpSettings, ModelSettings, ReplicaSettings, RoutingSettings, ServiceConfig, TenantSettings
from services.environment import message_environment
from services.free_port import free_port
from services.ingress.app import build_ingress
from services.ingress.cluster import SHARED_S
from services.ingress.listener import Listener
from services.ingress.routers import RouterConfig
from services.secret_files import replace_secret, secret_path
from services.store_address import StoreAddress
from wisp_core.errors import EngineUnavailableError
from wisp_core.store.redis_store import RedisStore

NAME, KEY, ADMIN_KEY = "ingress-test", "sk-ingress-test", "admin-ingress-test"
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def chunk(**fields: Any) -> bytes:
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [], **fields}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Engine:
    """Speaks as much of the replica's protocol as the ingress sees; the last message says what to do."""

    def __init__(self) -> None:
        self._tag = serve.get_replica_context().replica_tag
        self._cancelled = 0
        self._bodies: list[dict[str, Any]] = []

    async def http(
        self, *, path: str, body: bytes, headers: dict[str, str], session_key: str, **routing: Any
    ) -> AsyncIterator[dict[str, Any] | bytes]:
        fields = json.loads(body)
        self._bodies.append(fields)
        order = fields["messages"][-1]["content"]
        home = fields["messages"][0]["content"]
        if order == "engine dead at home" and home == self._tag:
            raise EngineUnavailableError("gone")
        if order == "die at home" and home == self._tag:
            os.kill(os.getpid(), 9)
        try:
            head = {"status": 200, "headers": {}, "replica_id": self._tag, "first": b""}
            if not fields.get("stream"):
                await asyncio.sleep(5 if order == "slowly" else 0)
                text = "m" * (5 << 20) if order.startswith("much") else self._tag
                message = {"role": "assistant", "content": text}
                choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
                yield head
                yield json.dumps(
                    {
                        "id": "c",
                        "object": "chat.completion",
                        "created": 1,
                        "model": "tiny",
                        "choices": choices,
                        "usage": USAGE,
                    }
                ).encode()
                return
            yield head
            for i in range(5):
                if order == "die halfway" and i == 3:
                    os.kill(os.getpid(), 9)
                yield chunk(choices=[{"index": 0, "delta": {"content": f"{i}"}}])
                await asyncio.sleep(5 if order == "slowly" and i else 0.01)
            yield chunk(usage=USAGE) + b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self._cancelled += 1
            raise

    async def health(self) -> dict[str, Any]:
        return {"replica_id": self._tag, "is_healthy": True}

    async def scrape(self) -> tuple[str, str]:
        return self._tag, "# TYPE engine_up gauge\nengine_up 1\n"

    async def facts(self) -> tuple[int, list[dict[str, Any]]]:
        return self._cancelled, self._bodies


@pytest.fixture(scope="module")
def service(ray_serve: None, valkey_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state_dir: Path = tmp_path_factory.mktemp("state")
    password_file = secret_path(state_dir, "redis")
    replace_secret(password_file, valkey_server.password)
    replace_secret(secret_path(state_dir, "admin"), ADMIN_KEY)
    config = ServiceConfig(
        name=NAME,
        state_dir=state_dir,
        http=HttpSettings(port=free_port()),
        model=ModelSettings(path="tiny"),
        replica=ReplicaSettings(vram_budget_bytes=1 << 20, count=2, engine={"max_model_len": 512}),
        routing=RoutingSettings(refresh_s=0.1),
        tenants=(
            TenantSettings(
                tenant_id="a",
                key_sha256=hashlib.sha256(KEY.encode()).hexdigest(),
                requests_per_minute=10_000,
                tokens_per_minute=10_000_000,
            ),
        ),
    )
    store = StoreAddress(url=valkey_server.url, password_file=password_file, service=NAME)
    replicas = serve.deployment(
        Engine,
        name="Engine",
        num_replicas=2,
        max_ongoing_requests=64,
        health_check_period_s=1.0,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": message_environment()}},
        request_router_config=RequestRouterConfig(
            request_router_class="services.ingress.router.WispRouter",
            request_router_kwargs=RouterConfig.of(config, store).kwargs(),
        ),
    ).bind()
    listener = Listener(config.http, state_dir)
    application = build_ingress(
        config,
        store,
        replicas,
        {},
        host=None,
        policy_app="no-such-app",
        service_began_s=time.time(),
        service_started_s=time.time(),
    )
    serve.run(application, name=NAME, route_prefix=None)
    yield f"http://127.0.0.1:{config.http.port}"
    serve.delete(NAME)
    listener.close()


@pytest.fixture
async def client(service: str, valkey: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{service}/v1", max_retries=0, timeout=20) as opened:
        yield opened


def session(name: str) -> dict[str, str]:
    return {"x-session-id": name}


async def chat(client: openai.AsyncOpenAI, *contents: str, name: str = "s") -> str:
    messages: Any = [{"role": "user", "content": content} for content in contents]
    answer = await client.chat.completions.create(model="tiny", messages=messages, extra_headers=session(name))
    return answer.choices[0].message.content or ""


async def stream(client: openai.AsyncOpenAI, *contents: str, name: str = "s", **options: Any) -> list[Any]:
    messages: Any = [{"role": "user", "content": content} for content in contents]
    chunks = await client.chat.completions.create(
        model="tiny", messages=messages, stream=True, extra_headers=session(name), **options
    )
    return [item async for item in chunks]


async def facts() -> list[tuple[int, list[dict[str, Any]]]]:
    handle = serve.get_deployment_handle("Engine", NAME)
    return await handle.broadcast("facts").results_async(timeout_s=5)


async def wait_ready(service: str) -> None:
    await asyncio.sleep(SHARED_S)  # For so long an answer from before may be told.
    async with httpx.AsyncClient() as http:
        for _ in range(200):
            if (await http.get(f"{service}/readyz")).status_code == 200:
                return
            await asyncio.sleep(0.1)
    pytest.fail("not ready again after 20 s")


async def test_chat_and_stream_through_the_openai_client(client: openai.AsyncOpenAI) -> None:
    home = await chat(client, "hello")
    assert await chat(client, "hello") == home
    chunks = await stream(client, "hello")
    assert "".join(c.choices[0].delta.content for c in chunks) == "01234"
    with_usage = await stream(client, "hello", stream_options={"include_usage": True})
    assert with_usage[-1].usage.completion_tokens == 5
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_errors_through_the_openai_client(client: openai.AsyncOpenAI, service: str) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={"priority": 1}
        )
    assert (bad.value.code, bad.value.param) == ("unknown_parameter", "priority")
    async with openai.AsyncOpenAI(api_key="sk-wrong", base_url=f"{service}/v1", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as wrong:
            await chat(stranger, "hello")
    assert wrong.value.code == "invalid_api_key"
    async with httpx.AsyncClient() as http:
        large = await http.post(
            f"{service}/v1/completions", content=b"x" * (3 << 20), headers={"authorization": f"Bearer {KEY}"}
        )
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_dead_engine_costs_no_turn(client: openai.AsyncOpenAI) -> None:
    home = await chat(client, "hello", name="engine-dead")
    other = await chat(client, home, "engine dead at home", name="engine-dead")
    assert other != home
    assert await chat(client, "hello", name="engine-dead") == other, "the session has moved"


async def test_a_killed_replica_costs_no_turn_that_has_sent_nothing(client: openai.AsyncOpenAI, service: str) -> None:
    home = await chat(client, "hello", name="killed")
    first, others = await asyncio.gather(
        stream(client, home, "die at home", name="killed"),
        asyncio.gather(*(chat(client, "hello", name=f"other{i}") for i in range(20))),
    )
    assert "".join(c.choices[0].delta.content for c in first) == "01234"
    assert len(others) == 20
    await wait_ready(service)


async def test_a_stream_that_breaks_ends_with_an_error(client: openai.AsyncOpenAI, service: str) -> None:
    with pytest.raises(openai.APIError) as broken:
        await stream(client, "die halfway", name="halfway")
    assert "incomplete" in str(broken.value)
    await wait_ready(service)


async def wait_cancelled(count: int) -> None:
    for _ in range(40):
        if sum(cancelled for cancelled, _ in await facts()) == count:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the replica was still answering 2 s after its client had left")


async def test_a_client_that_leaves_cancels_its_turn_on_the_replica(client: openai.AsyncOpenAI, service: str) -> None:
    await wait_ready(service)
    before = sum(cancelled for cancelled, _ in await facts())
    chunks = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "slowly"}], stream=True
    )
    await anext(aiter(chunks))
    await chunks.close()
    await wait_cancelled(before + 1)
    with pytest.raises(openai.APITimeoutError):
        await chat(client.with_options(timeout=0.5), "slowly")
    await wait_cancelled(before + 2)


async def test_the_replica_gets_only_what_is_allowed_with_the_tenant_s_salt(client: openai.AsyncOpenAI) -> None:
    await chat(client, "look at this body", name="body")
    bodies = [body for _, bodies in await facts() for body in bodies]
    (body,) = [body for body in bodies if body["messages"][-1]["content"] == "look at this body"]
    assert set(body) == {"model", "messages", "cache_salt", "vllm_xargs"}
    assert len(body["cache_salt"]) == 64
    assert body["vllm_xargs"] == {"wisp_session": "a//body", "wisp_weight": 1.0, "wisp_kv_share": 1.0}


async def test_bodies_and_answers_may_be_longer_than_grpc_s_default(client: openai.AsyncOpenAI) -> None:
    body = "much " + "é" * 800_000
    assert len(body.encode()) < 2 << 20 < 4 << 20 < len(json.dumps(body)), "sent as UTF-8, written anew as ASCII"
    assert await chat(client, body, name="much") == "m" * (5 << 20)


async def test_status_and_metrics(client: openai.AsyncOpenAI, service: str, valkey: Any) -> None:
    await stream(client, "hello", name="shown")
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{service}/wisp/status")).status_code == 401
        deadline_s = time.monotonic() + 5
        rows: list[dict[str, Any]] = []
        while not rows and time.monotonic() < deadline_s:  # A turn is written down soon after its answer.
            await asyncio.sleep(0.1)
            shown = await http.get(f"{service}/wisp/status", headers={"authorization": f"Bearer {ADMIN_KEY}"})
            rows = [row for row in shown.json()["sessions"] if row["session_key"] == "a//shown"]
        metrics = (await http.get(f"{service}/metrics")).text
    (row,) = rows
    assert (row["turns"], row["completion_tokens"], row["moves"]) == (1, 5, 0)
    assert row["home"] == row["replica_id"]
    assert metrics.count("# TYPE engine_up gauge") == 1
    assert metrics.count("engine_up{replica=") == 2
    assert 'wisp_ingress_ttft_seconds_bucket{le="0.5",replica="ingress",tenant="a"}' in metrics
    assert KEY not in metrics + shown.text


async def test_serving_goes_on_while_valkey_is_down(client: openai.AsyncOpenAI, valkey: Any) -> None:
    home = await chat(client, "hello", name="outage")
    valkey.kill()
    try:
        for i in range(20):
            assert await chat(client, "hello", name="outage") == home
            assert await chat(client, "hello", name=f"new{i}")
    finally:
        valkey.start()
    await asyncio.sleep(6)
    assert await chat(client, "hello", name="outage") == home
    store = RedisStore(valkey.url, NAME, password=valkey.password, timeout_s=1)
    assert [tenant.tenant_id for tenant in await store.list_tenants()] == ["a"], "written again by the ingress"
    await store.close()
