"""HTTP of the operator: status, metrics and tenants. What shows or changes anything of tenants takes the admin key."""

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
from services.ingress.openapi import routes
from wisp_core.tenant_contracts import TenantLimits

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def operator_routes(
    cluster: Cluster, tenants: TenantAdmin, http: HttpSettings, *, admin_key: str, metrics_key: str
) -> list[Route]:
    """All of them. ``metrics_key`` opens the metrics and nothing else."""
    check_admin, check_scraper = _checker(admin_key), _checker(admin_key, metrics_key)

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        is_ready, details = await cluster.readiness()
        return JSONResponse({"ready": is_ready, **details}, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        if http.host not in LOOPBACK:
            check_scraper(request)
        return PlainTextResponse(await cluster.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(request: Request) -> Response:
        check_admin(request)
        return JSONResponse(await cluster.status())

    async def recording(request: Request) -> Response:
        check_admin(request)
        turns = request.query_params.get("turns", "0")
        if not turns.isdecimal() or len(turns) > 6:
            raise bad_request("'turns' must be a number of turns, 0 to 999999")
        return JSONResponse(await cluster.recording(int(turns)))

    operator = routes(healthz=healthz, readyz=readyz, metrics=metrics, status=status, recording=recording)
    return [*operator, *_tenant_routes(tenants, http, check_admin)]


def _checker(*keys: str) -> Callable[[Request], None]:
    """Raises ApiError (401) for a request that has none of ``keys``."""
    allowed = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() != "bearer" or not any(hmac.compare_digest(given, one) for one in allowed):
            raise invalid_key()

    return check


def _tenant_routes(tenants: TenantAdmin, http: HttpSettings, check_admin: Callable[[Request], None]) -> list[Route]:
    async def body_of(request: Request) -> bytes:
        check_admin(request)
        return await read_body(request, http.max_body_bytes, http.body_timeout_s)

    async def list_tenants(request: Request) -> Response:
        check_admin(request)
        return JSONResponse({"tenants": await tenants.list()})

    async def add_tenant(request: Request) -> Response:
        return JSONResponse(await tenants.add(parse(NewTenant, await body_of(request))), 201)

    async def limit_tenant(request: Request) -> Response:
        limits = parse(TenantLimits, await body_of(request))
        return JSONResponse(await tenants.limit(request.path_params["tenant_id"], limits))

    async def rotate_key(request: Request) -> Response:
        rotation = parse(Rotation, await body_of(request))
        return JSONResponse(await tenants.rotate(request.path_params["tenant_id"], rotation))

    async def remove_tenant(request: Request) -> Response:
        check_admin(request)
        await tenants.remove(request.path_params["tenant_id"])
        return Response(status_code=204)

    return routes(
        list_tenants=list_tenants,
        add_tenant=add_tenant,
        limit_tenant=limit_tenant,
        remove_tenant=remove_tenant,
        rotate_key=rotate_key,
    )
