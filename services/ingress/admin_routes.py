"""HTTP of the operator: status, metrics and tenants. Everything that shows or changes something takes the admin key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from services.config import HttpSettings
from services.ingress.admin import NewTenant, Rotation, TenantAdmin, parse
from services.ingress.body import read_body
from services.ingress.cluster import Cluster
from services.ingress.errors import bad_request, invalid_key
from wisp_core.tenant_contracts import TenantLimits

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def add_operator_routes(
    app: FastAPI, cluster: Cluster, tenants: TenantAdmin, http: HttpSettings, admin_key: str
) -> None:
    """Add all of them."""
    check_admin = _checker(hashlib.sha256(admin_key.encode()).digest())

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process answers."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> Response:
        """Every engine serves."""
        is_ready, details = await cluster.readiness()
        return JSONResponse({"ready": is_ready, **details}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """All processes' metrics; with the admin key where the service is not on loopback only."""
        if http.host not in LOOPBACK:
            check_admin(request)
        return PlainTextResponse(await cluster.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/wisp/status")
    async def status(request: Request) -> Response:
        """Replicas, splits, sessions and decisions."""
        check_admin(request)
        return JSONResponse(await cluster.status())

    @app.get("/wisp/recording")
    async def recording(request: Request) -> Response:
        """Snapshots with their curves, and finished turns in numbers: ``?turns=N`` of them."""
        check_admin(request)
        turns = request.query_params.get("turns", "0")
        if not turns.isdecimal() or len(turns) > 6:
            raise bad_request("'turns' must be a number of turns, 0 to 999999")
        return JSONResponse(await cluster.recording(int(turns)))

    _add_tenant_routes(app, tenants, http, check_admin)


def _checker(admin_sha256: bytes) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, admin_sha256):
            raise invalid_key()

    return check


def _add_tenant_routes(
    app: FastAPI, tenants: TenantAdmin, http: HttpSettings, check_admin: Callable[[Request], None]
) -> None:
    async def body_of(request: Request) -> bytes:
        check_admin(request)
        return await read_body(request, http.max_body_bytes, http.body_timeout_s)

    @app.get("/wisp/tenants")
    async def list_tenants(request: Request) -> Response:
        """Every tenant: limits and usage."""
        check_admin(request)
        return JSONResponse({"tenants": await tenants.list()})

    @app.post("/wisp/tenants")
    async def add_tenant(request: Request) -> Response:
        """A new tenant; the answer is the only place that shows its key."""
        return JSONResponse(await tenants.add(parse(NewTenant, await body_of(request))), 201)

    @app.patch("/wisp/tenants/{tenant_id}")
    async def limit_tenant(request: Request, tenant_id: str) -> Response:
        """Other limits."""
        return JSONResponse(await tenants.limit(tenant_id, parse(TenantLimits, await body_of(request))))

    @app.post("/wisp/tenants/{tenant_id}/rotate")
    async def rotate_key(request: Request, tenant_id: str) -> Response:
        """A new key; the answer is the only place that shows it."""
        return JSONResponse(await tenants.rotate(tenant_id, parse(Rotation, await body_of(request))))

    @app.delete("/wisp/tenants/{tenant_id}")
    async def remove_tenant(request: Request, tenant_id: str) -> Response:
        """The end of a tenant and its keys."""
        check_admin(request)
        await tenants.remove(tenant_id)
        return Response(status_code=204)
