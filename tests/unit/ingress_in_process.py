"""An ingress in this process, called over raw ASGI, with a scripted replica behind the handle."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.config import HttpSettings, ModelSettings, ReplicaSettings, ServiceConfig, TenantSettings
from services.ingress.admin import TenantAdmin
from services.ingress.cluster import Cluster
from services.ingress.gateway import Gateway
from services.ingress.http import build_app
from services.ingress.limits import TurnLimiter
from services.ingress.metrics import IngressMetrics
from services.ingress.replicas import ReplicaClient
from services.ingress.tenants import TenantDirectory
from services.telemetry import Telemetry
from wisp_core.store.memory_store import MemoryStore
from wisp_core.tenant_contracts import TenantSpec

KEY, OTHER_KEY, ADMIN_KEY, METRICS_KEY = "sk-tenant-a", "sk-tenant-b", "admin-secret", "metrics-secret"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
ANSWER = {"id": "x", "choices": [{"message": {"content": "hi"}}], "usage": USAGE}
HEAD = {"status": 200, "headers": {}, "replica_id": "r1"}
EVENTS = [
    b'data: {"choices": [{"delta": {"content": "h"}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "i"}}]}\n\n',
    b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\ndata: [DONE]\n\n",
]


def declare(tenant_id: str, key: str, **limits: Any) -> TenantSpec:
    """A tenant of the service's file."""
    values = {"requests_per_minute": 100, "tokens_per_minute": 10_000, "is_from_file": True, **limits}
    return TenantSpec(tenant_id=tenant_id, key_sha256=(hashlib.sha256(key.encode()).hexdigest(),), **values)


def as_sent(script: list[Any]) -> list[Any]:
    """A script whose head brings the first piece with it; without one a replica sends no head."""
    head, *rest = script
    if not isinstance(head, dict) or "first" in head:
        return script
    return [{**head, "first": rest[0]}, *rest[1:]] if rest and isinstance(rest[0], bytes) else rest


class Call:
    """One call by handle: yields or raises what its script says."""

    def __init__(self, script: list[Any], arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.is_cancelled = False
        self._script = iter(as_sent(script))

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
class Broadcast:
    """What Serve gives for a call of all replicas; an answer None never comes, and an exception is raised."""

    answers: list[Any]

    async def _fetch_replica_results_async(self) -> list[Broadcast]:
        return [Broadcast([answer]) for answer in self.answers]

    async def get_async(self) -> Any:
        (answer,) = self.answers
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            raise answer
        return answer


@dataclass
class ScriptedHandle:
    """Stands for Serve's handle; each call takes the next script."""

    scripts: list[list[Any]] = field(default_factory=list)
    health: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    session_ids: list[str] = field(default_factory=list)
    broadcasts: list[str] = field(default_factory=list)

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
        self.broadcasts.append(method_name)
        answers: list[Any] = self.health if method_name == "health" else [("r1", "# TYPE wisp_x gauge\nwisp_x 1\n")]
        return Broadcast(answers)


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

    def __init__(
        self,
        *,
        key_file: Path | None = None,
        started_s: float = 0.0,
        host: str = "127.0.0.1",
        max_body_bytes: int = 10_000,
        max_model_len: int | None = 512,
        **limits: Any,
    ) -> None:
        self.handle, self.own_handle = ScriptedHandle(), ScriptedHandle()
        self.store, self.telemetry = MemoryStore(), Telemetry()
        config = ServiceConfig(
            http=HttpSettings(host=host, max_body_bytes=max_body_bytes, max_header_bytes=2_000, body_timeout_s=0.2),
            model=ModelSettings(path="models/tiny"),
            replica=ReplicaSettings(vram_budget_bytes=1 << 20, count=2, engine={"max_model_len": max_model_len}),
            tenants=(TenantSettings(tenant_id="a", key_sha256="0" * 64),),
        )
        declared = [declare("a", KEY, **limits), declare("b", OTHER_KEY)]
        tenants = TenantDirectory(self.store, lambda: declared)
        metrics = IngressMetrics(self.telemetry)
        self.gateway = Gateway(
            config,
            salt_secret="salt",
            tenants=tenants,
            store=self.store,
            limiter=TurnLimiter(self.store),
            replicas=ReplicaClient(self.handle, metrics.count_retry),
            dedicated={"own": ReplicaClient(self.own_handle, metrics.count_retry)},
            metrics=metrics,
        )
        self.cluster = Cluster(
            self.store,
            [self.handle],
            lambda: self.handle,
            self.telemetry,
            num_replicas=2,
            stale_after_s=10,
            service_started_s=started_s,
        )
        self.tenants = tenants
        admin = TenantAdmin(self.store, tenants, {"a": key_file, "b": None})
        keys = {"admin_key": ADMIN_KEY, "metrics_key": METRICS_KEY}
        self.app = build_app(self.gateway, self.cluster, admin, config.http, **keys)

    async def request(
        self,
        path: str,
        body: bytes | list[bytes | float | None] = b"",
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        leaves_after: int | None = None,
    ) -> Reply:
        """One request; the client leaves after ``leaves_after`` pieces of the answer.

        Numbers in ``body`` are pauses; at None the client leaves.
        """
        reply, has_left = Reply(), asyncio.Event()
        parts = [body] if isinstance(body, bytes) else list(body)
        given = {"host": "test", **({"authorization": f"Bearer {KEY}"} if headers is None else headers)}

        async def receive() -> dict[str, Any]:
            if parts and isinstance(parts[0], float):
                await asyncio.sleep(parts.pop(0))
            if parts and parts[0] is None:
                return {"type": "http.disconnect"}
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
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        await asyncio.wait_for(self.app(scope, receive, send), 10)
        await self.gateway.drain()
        return reply

    async def admin(self, path: str, method: str = "GET", **fields: Any) -> Reply:
        """One request of an operator."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        body = json.dumps(fields).encode() if fields else b""
        return await self.request(path, body, method=method, headers=headers)

    async def chat(
        self, *, headers: dict[str, str] | None = None, leaves_after: int | None = None, **fields: Any
    ) -> Reply:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
        own = None if headers is None else {"authorization": f"Bearer {KEY}", **headers}
        return await self.request(
            "/v1/chat/completions", json.dumps(body).encode(), method="POST", headers=own, leaves_after=leaves_after
        )
