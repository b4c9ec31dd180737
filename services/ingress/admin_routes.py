"""HTTP of the operator: status, metrics and tenants. Everything that shows or changes something takes the admin key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from services.config import HttpSettings
from services.ingress.admin import NewTenant, Rotation, TenantAdmin, parse
from services.ingress.body import read_body
from services.ingress.cluster import Cluster
from services.ingress.errors import bad_request, invalid_key
from wisp_core.tenant_contracts import TenantLimits

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def operator_routes(cluster: Cluster, tenants: TenantAdmin, http: HttpSettings, admin_key: str) -> list[Route]:
    """All of them."""
    check_admin = _checker(hashlib.sha256(admin_key.encode()).digest())

    async def healthz(_: Request) -> Response:
        """This process answers."""
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        """Every engine serves."""
        is_ready, details = await cluster.readiness()
        return JSONResponse({"ready": is_ready, **details}, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        """All processes' metrics; with the admin key where the service is not on loopback only."""
        if http.host not in LOOPBACK:
            check_admin(request)
        return PlainTextResponse(await cluster.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(request: Request) -> Response:
        """Replicas, splits, sessions and decisions."""
        check_admin(request)
        return JSONResponse(await cluster.status())

    async def recording(request: Request) -> Response:
        """Snapshots with their curves, and finished turns in numbers: ``?turns=N`` of them."""
        check_admin(request)
        turns = request.query_params.get("turns", "0")
        if not turns.isdecimal() or len(turns) > 6:
            raise bad_request("'turns' must be a number of turns, 0 to 999999")
        return JSONResponse(await cluster.recording(int(turns)))

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/wisp/status", status),
        Route("/wisp/recording", recording),
        *_tenant_routes(tenants, http, check_admin),
    ]


def _checker(admin_sha256: bytes) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, admin_sha256):
            raise invalid_key()

    return check


def _tenant_routes(tenants: TenantAdmin, http: HttpSettings, check_admin: Callable[[Request], None]) -> list[Route]:
    async def body_of(request: Request) -> bytes:
        check_admin(request)
        return await read_body(request, http.max_body_bytes, http.body_timeout_s)

    async def list_tenants(request: Request) -> Response:
        """Every tenant: limits and usage."""
        check_admin(request)
        return JSONResponse({"tenants": await tenants.list()})

    async def add_tenant(request: Request) -> Response:
        """A new tenant; the answer is the only place that shows its key."""
        return JSONResponse(await tenants.add(parse(NewTenant, await body_of(request))), 201)

    async def limit_tenant(request: Request) -> Response:
        """Other limits."""
        limits = parse(TenantLimits, await body_of(request))
        return JSONResponse(await tenants.limit(request.path_params["tenant_id"], limits))

    async def rotate_key(request: Request) -> Response:
        """A new key; the answer is the only place that shows it."""
        rotation = parse(Rotation, await body_of(request))
        return JSONResponse(await tenants.rotate(request.path_params["tenant_id"], rotation))

    async def remove_tenant(request: Request) -> Response:
        """The end of a tenant and its keys."""
        check_admin(request)
        await tenants.remove(request.path_params["tenant_id"])
        return Response(status_code=204)

    return [
        Route("/wisp/tenants", list_tenants),
        Route("/wisp/tenants", add_tenant, methods=["POST"]),
        Route("/wisp/tenants/{tenant_id}", limit_tenant, methods=["PATCH"]),
        Route("/wisp/tenants/{tenant_id}", remove_tenant, methods=["DELETE"]),
        Route("/wisp/tenants/{tenant_id}/rotate", rotate_key, methods=["POST"]),
    ]
