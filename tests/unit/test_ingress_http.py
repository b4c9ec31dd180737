"""The ingress over raw ASGI, with a scripted replica behind the handle: answers, errors, retries, leaving clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from services.config import HttpSettings, ModelSettings, ReplicaSettings, ServiceConfig, TenantSettings
from services.ingress.cluster import Cluster
from services.ingress.gateway import Gateway
from services.ingress.http import build_app
from services.ingress.limits import TurnLimiter
from services.ingress.metrics import IngressMetrics
from services.ingress.replicas import MAX_ATTEMPTS, ReplicaClient
from services.ingress.sessions import cache_salt
from services.ingress.tenants import TenantDirectory
from services.telemetry import Telemetry
from wisp_core.contracts import TenantSpec
from wisp_core.errors import EngineUnavailableError
from wisp_core.store.interface import Admission
from wisp_core.store.memory_store import MemoryStore

KEY, ADMIN_KEY = "sk-tenant-a", "admin-secret"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
ANSWER = {"id": "x", "choices": [{"message": {"content": "hi"}}], "usage": USAGE}
HEAD = {"status": 200, "headers": {}, "replica_id": "r1"}
EVENTS = [
    b'data: {"choices": [{"delta": {"content": "h"}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "i"}}]}\n\n',
    b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\ndata: [DONE]\n\n",
]


class Call:
    """One call by handle: yields or raises what its script says."""

    def __init__(self, script: list[Any], arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.is_cancelled = False
        self._script = iter(script)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        if self.is_cancelled:
            raise asyncio.CancelledError
        item = next(self._script, None)
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        if callable(item):
            return await item()
        return item

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class ScriptedHandle:
    """Stands for Serve's handle; each call takes the next script."""

    scripts: list[list[Any]] = field(default_factory=list)
    health: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    session_ids: list[str] = field(default_factory=list)

    def options(self, *, stream: bool, session_id: str) -> ScriptedHandle:
        assert stream
        self.session_ids.append(session_id)
        return self

    @property
    def http(self) -> ScriptedHandle:
        return self

    def remote(self, **arguments: Any) -> Call:
        self.calls.append(Call(self.scripts.pop(0), arguments))
        return self.calls[-1]

    def broadcast(self, method_name: str) -> Any:
        answers: list[Any] = list(self.health) if method_name == "health" else ["# TYPE wisp_x gauge\nwisp_x 1\n"]

        class Response:
            async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
                return answers

        return Response()


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Service:
    """An ingress in this process."""

    def __init__(self, **limits: int) -> None:
        self.handle, self.store, self.telemetry = ScriptedHandle(), MemoryStore(), Telemetry()
        config = ServiceConfig(
            http=HttpSettings(max_body_bytes=10_000, max_header_bytes=2_000),
            model=ModelSettings(path="models/tiny"),
            replica=ReplicaSettings(vram_budget_bytes=1 << 20, count=2, engine={"max_model_len": 512}),
            tenants=(TenantSettings(tenant_id="a", key_sha256="0" * 64),),
        )
        key_sha256 = hashlib.sha256(KEY.encode()).hexdigest()
        values = {"requests_per_minute": 100, "tokens_per_minute": 10_000, **limits}
        tenants = TenantDirectory(self.store, [TenantSpec(tenant_id="a", key_sha256=(key_sha256,), **values)])
        self.gateway = Gateway(
            config,
            salt_secret="salt",
            tenants=tenants,
            store=self.store,
            limiter=TurnLimiter(self.store),
            replicas=ReplicaClient(self.handle),
            metrics=IngressMetrics(self.telemetry),
        )
        cluster = Cluster(
            self.store, self.handle, lambda: self.handle, self.telemetry, num_replicas=2, stale_after_s=10
        )
        self.app = build_app(self.gateway, cluster, config.http, ADMIN_KEY)

    async def request(
        self,
        path: str,
        body: bytes | list[bytes] = b"",
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        leaves_after: int | None = None,
    ) -> Reply:
        """One request; the client leaves after ``leaves_after`` pieces of the answer."""
        reply, has_left = Reply(), asyncio.Event()
        parts = [body] if isinstance(body, bytes) else list(body)
        given = {"host": "test", **({"authorization": f"Bearer {KEY}"} if headers is None else headers)}

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            elif message.get("body"):
                reply.pieces.append(message["body"])
                if leaves_after is not None and len(reply.pieces) >= leaves_after:
                    has_left.set()
                    await asyncio.sleep(0.05)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        await asyncio.wait_for(self.app(scope, receive, send), 10)
        await self.gateway.drain()
        return reply

    async def chat(
        self, *, headers: dict[str, str] | None = None, leaves_after: int | None = None, **fields: Any
    ) -> Reply:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
        own = None if headers is None else {"authorization": f"Bearer {KEY}", **headers}
        return await self.request(
            "/v1/chat/completions", json.dumps(body).encode(), method="POST", headers=own, leaves_after=leaves_after
        )


@pytest.fixture
def service() -> Service:
    return Service()


async def test_a_whole_answer_passes_as_the_engine_gave_it(service: Service) -> None:
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    reply = await service.chat(user="ann", headers={"x-session-id": "s1", "x-cache-salt": "mine"})
    assert (reply.status, json.loads(reply.body)) == (200, ANSWER)
    assert reply.headers["x-session-id"] == "s1"
    arguments = service.handle.calls[0].arguments
    assert service.handle.session_ids == ["a/ann/s1"]
    assert (arguments["session_key"], arguments["user_key"], arguments["tenant"]) == ("a/ann/s1", "a/ann", "a")
    assert json.loads(arguments["body"])["cache_salt"] == cache_salt("salt", "a", "mine")
    assert arguments["headers"]["x-request-id"] == reply.headers["x-turn-id"]
    assert reply.headers["x-turn-id"].startswith("a-")


async def test_a_turn_is_recorded_with_what_the_engine_counted(service: Service) -> None:
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    await service.chat(headers={"x-session-id": "s1"})
    (usage,) = await service.store.list_sessions(10)
    assert (usage.session_key, usage.replica_id, usage.turns, usage.failed_turns) == ("a//s1", "r1", 1, 0)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (7, 4, 3)
    assert usage.ttft_turns == 1
    assert 'wisp_ingress_turns_total{status="200",tenant="a"} 1.0' in service.telemetry.scrape()


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_a_stream_passes_in_pieces_and_shows_usage_only_if_asked(service: Service, wants_usage: bool) -> None:
    service.handle.scripts = [[HEAD, *EVENTS]]
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    reply = await service.chat(stream=True, **options)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (b'"usage"' in reply.body) == wants_usage
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.body.startswith(EVENTS[0])
    (usage,) = await service.store.list_sessions(10)
    assert usage.completion_tokens == 3


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        [RayActorError()],
        [EngineUnavailableError("gone")],
        [HEAD, RayActorError()],
        [{"status": 503, "headers": {}}, b"{}"],
    ],
)
async def test_a_turn_that_has_sent_nothing_is_tried_again(
    service: Service, failure: list[Any], is_stream: bool
) -> None:
    good = [HEAD, *EVENTS] if is_stream else [HEAD, json.dumps(ANSWER).encode()]
    service.handle.scripts = [list(failure), good]
    reply = await service.chat(stream=is_stream)
    assert reply.status == 200
    first, second = service.handle.calls
    assert first.is_cancelled
    assert first.arguments == second.arguments, "the router knows by the turn's id where it was"
    (usage,) = await service.store.list_sessions(10)
    assert (usage.turns, usage.failed_turns) == (1, 0)
    assert "wisp_ingress_retries_total 1.0" in service.telemetry.scrape()


async def test_an_unstreamed_answer_lost_halfway_is_repeated(service: Service) -> None:
    whole = json.dumps(ANSWER).encode()
    service.handle.scripts = [[HEAD, whole[:10], RayActorError()], [HEAD, whole]]
    reply = await service.chat()
    assert (reply.status, json.loads(reply.body)) == (200, ANSWER)


async def test_attempts_are_bounded_and_end_in_503(service: Service) -> None:
    service.handle.scripts = [[RayActorError()] for _ in range(MAX_ATTEMPTS)]
    reply = await service.chat(stream=True)
    assert reply.status == 503
    assert reply.headers["retry-after"] == "2"
    assert reply.error["code"] == "service_unavailable"
    assert len(service.handle.calls) == MAX_ATTEMPTS
    (usage,) = await service.store.list_sessions(10)
    assert usage.failed_turns == 1


async def test_no_replica_at_all_is_503(service: Service) -> None:
    service.handle.scripts = [[DeploymentUnavailableError(DeploymentID("Replica", "wisp"))]]
    reply = await service.chat()
    assert (reply.status, reply.headers["retry-after"]) == (503, "10")


async def test_a_bug_behind_a_stream_ends_it_with_an_error_event_and_counts_as_failed(service: Service) -> None:
    service.handle.scripts = [[HEAD, EVENTS[0], KeyError("prompt of somebody")]]
    reply = await service.chat(stream=True)
    last = reply.body.removeprefix(EVENTS[0])
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"somebody" not in reply.body
    (usage,) = await service.store.list_sessions(10)
    assert usage.failed_turns == 1


async def test_a_stream_that_breaks_ends_with_an_error_event(service: Service) -> None:
    service.handle.scripts = [[HEAD, EVENTS[0], EVENTS[1], RayActorError()]]
    reply = await service.chat(stream=True)
    assert reply.status == 200
    assert reply.body.startswith(EVENTS[0] + EVENTS[1])
    last = reply.body.removeprefix(EVENTS[0] + EVENTS[1])
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"[DONE]" not in reply.body
    (usage,) = await service.store.list_sessions(10)
    assert (usage.failed_turns, usage.completion_tokens) == (1, 2)


async def test_a_client_that_leaves_cancels_its_turn_and_gets_unused_tokens_back() -> None:
    service = Service(tokens_per_minute=520)
    is_waiting = asyncio.Event()
    service.handle.scripts = [[HEAD, EVENTS[0], EVENTS[1], is_waiting.wait], [HEAD, *EVENTS]]
    await service.chat(stream=True, max_tokens=400, leaves_after=1)
    assert service.handle.calls[0].is_cancelled
    reply = await service.chat(stream=True, max_tokens=400)
    assert reply.status == 200
    assert 'status="499"' in service.telemetry.scrape()


async def test_a_client_that_leaves_while_the_answer_starts_cancels_its_turn(service: Service) -> None:
    forever = asyncio.Event()
    service.handle.scripts = [[HEAD, EVENTS[0], forever.wait]]

    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    reply = await service.gateway.turn(
        "/v1/chat/completions", {}, body, await service.gateway.authenticate({"authorization": f"Bearer {KEY}"})
    )
    assert not isinstance(reply.body, bytes)
    await reply.body.aclose()
    await service.gateway.drain()
    assert service.handle.calls[0].is_cancelled
    assert (await service.store.list_sessions(1))[0].turns == 1


async def test_a_client_that_leaves_while_its_turn_is_admitted_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(max_concurrent_turns=1)
    admit, is_counted = service.store.admit, asyncio.Event()

    async def admit_slowly(*arguments: Any) -> Admission:
        admission = await admit(*arguments)
        is_counted.set()
        await asyncio.sleep(10)
        return admission

    with monkeypatch.context() as patch:
        patch.setattr(service.store, "admit", admit_slowly)
        leaving = asyncio.create_task(service.chat())
        await is_counted.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    await service.gateway.drain()
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200


async def test_leaving_an_unstreamed_turn_is_no_way_around_the_quota() -> None:
    service = Service(tokens_per_minute=600)
    forever = asyncio.Event()
    service.handle.scripts = [[HEAD, forever.wait]]
    tenant = await service.gateway.authenticate({"authorization": f"Bearer {KEY}"})
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400}).encode()
    turn = asyncio.create_task(service.gateway.turn("/v1/chat/completions", {}, body, tenant))
    await asyncio.sleep(0.05)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    await service.gateway.drain()
    assert service.handle.calls[0].is_cancelled
    assert (await service.chat(max_tokens=400)).status == 429


async def test_the_engine_s_client_errors_come_in_openai_s_form(service: Service) -> None:
    message = "This model's maximum context length is 512 tokens."
    engine = {"error": {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
    for is_stream in (False, True):
        service.handle.scripts = [[{"status": 400, "headers": {}}, json.dumps(engine).encode()]]
        reply = await service.chat(stream=is_stream)
        assert reply.status == 400
        assert reply.error == {
            "message": message,
            "type": "invalid_request_error",
            "param": "input_tokens",
            "code": "context_length_exceeded",
        }


async def test_the_engine_s_own_troubles_stay_inside(service: Service) -> None:
    service.handle.scripts = [[{"status": 500, "headers": {}}, b'{"error": {"message": "Traceback /srv/secret"}}']]
    reply = await service.chat()
    assert reply.status == 500
    assert b"secret" not in reply.body
    service.handle.scripts = [[ValueError("a bug with /srv/secret")]]
    with pytest.raises(ValueError, match="a bug"):  # Starlette answers, then lets the server log it.
        await service.chat()


async def test_a_prompt_that_cannot_be_answered_costs_nothing() -> None:
    service = Service(tokens_per_minute=600)
    engine = json.dumps({"error": {"message": "too long"}}).encode()
    for _ in range(5):
        service.handle.scripts = [[{"status": 400, "headers": {}}, engine]]
        assert (await service.chat(max_tokens=100_000)).status == 400


async def test_over_quota() -> None:
    service = Service(requests_per_minute=1)
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200
    reply = await service.chat()
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert 59 <= int(reply.headers["retry-after"]) <= 60
    assert len(service.handle.calls) == 1


async def test_n_counts_against_the_tokens() -> None:
    service = Service(tokens_per_minute=500)
    reply = await service.chat(n=5, max_tokens=100)
    assert (reply.status, reply.error["type"]) == (429, "tokens")


async def test_wrong_keys_and_models(service: Service) -> None:
    for headers in ({}, {"authorization": "Bearer nope"}):
        reply = await service.request("/v1/chat/completions", b"{}", method="POST", headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    reply = await service.chat(model="gpt-9")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert (await service.request("/v1/models", headers={})).status == 401


async def test_models(service: Service) -> None:
    listed = json.loads((await service.request("/v1/models")).body)
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert json.loads((await service.request("/v1/models/tiny")).body)["object"] == "model"
    assert (await service.request("/v1/models/other")).error["code"] == "model_not_found"


async def test_a_large_body_is_refused_declared_or_not(service: Service) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-length": "10001"}
    reply = await service.request("/v1/completions", b"", method="POST", headers=headers)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    reply = await service.request("/v1/completions", [b"x" * 4000] * 50, method="POST")
    assert reply.status == 413


async def test_large_headers_are_refused(service: Service) -> None:
    reply = await service.request("/healthz", headers={"x-filler": "x" * 2000})
    assert (reply.status, reply.error["code"]) == (431, "headers_too_large")


async def test_unknown_urls_and_methods_answer_in_openai_s_form(service: Service) -> None:
    assert (await service.request("/v1/embeddings", method="POST")).error["type"] == "invalid_request_error"
    assert (await service.request("/v1/chat/completions")).status == 405
    for path in ("/docs", "/openapi.json", "/reset_prefix_cache", "/collective_rpc", "/sleep"):
        assert (await service.request(path, method="POST")).status == 404


async def test_readiness_tells_which_engine_is_dead(service: Service) -> None:
    good, bad = {"replica_id": "r1", "is_healthy": True}, {"replica_id": "r2", "is_healthy": False}
    for health, status in (([], 503), ([good], 503), ([good, bad], 503), ([good, {**good, "replica_id": "r2"}], 200)):
        service.handle.health = health
        reply = await service.request("/readyz", headers={})
        assert reply.status == status
        assert len(json.loads(reply.body)["replicas"]) == len(health)
    assert (await service.request("/healthz", headers={})).status == 200


async def test_status_needs_the_admin_key(service: Service) -> None:
    for key in (KEY, "", "wrong"):
        assert (await service.request("/wisp/status", headers={"authorization": f"Bearer {key}"})).status == 401
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    await service.chat(headers={"x-session-id": "s1"})
    reply = await service.request("/wisp/status", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert json.loads(reply.body)["sessions"][0]["session_key"] == "a//s1"
    service.store.is_available = False
    assert (await service.request("/wisp/status", headers={"authorization": f"Bearer {ADMIN_KEY}"})).status == 503


async def test_metrics_show_every_process_once_per_family(service: Service) -> None:
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    await service.chat()
    text = (await service.request("/metrics", headers={})).body.decode()
    assert 'wisp_ingress_turns_total{replica="ingress",status="200",tenant="a"} 1.0' in text
    assert 'wisp_x{replica="replica-0"} 1.0' in text
    assert text.count("# TYPE wisp_x gauge") == 1


async def test_serving_goes_on_without_the_store(service: Service) -> None:
    service.store.is_available = False
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200


async def test_no_key_prompt_or_salt_is_logged_or_measured(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    service.handle.scripts = [[RayActorError()], [HEAD, json.dumps(ANSWER).encode()]]
    prompt = [{"role": "user", "content": "my secret prompt"}]
    await service.chat(messages=prompt, headers={"x-cache-salt": "my-own-salt"})
    await service.chat(messages=[{"role": "user", "content": ["my secret prompt"]}])
    written = caplog.text + service.telemetry.scrape()
    assert not any(secret in written for secret in (KEY, ADMIN_KEY, "secret prompt", "my-own-salt"))
