"""The service's interface: one table of its operations, as routes and as an OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.ingress.admin import NewTenant, Rotation
from services.ingress.chat_fields import ChatFields, CompletionFields
from services.ingress.request_fields import CHAT_PATH, COMPLETIONS_PATH
from wisp_core.tenant_contracts import TenantLimits

_ERRORS = {
    "400": "The request has to be changed.",
    "401": "No key, or one that belongs to nobody.",
    "404": "There is no such model, tenant or URL.",
    "408": "The body did not come in time.",
    "409": "That contradicts what is there.",
    "413": "The body is too large.",
    "429": "A limit of the tenant; Retry-After says when to try again.",
    "431": "The headers are too large.",
    "503": "Nothing was done; the same request may succeed later.",
}
_SESSION = {
    "name": "x-session-id",
    "in": "header",
    "description": "Names the session of a turn.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:@=+~-]{1,128}$"},
}
_SALT = {
    "name": "x-cache-salt",
    "in": "header",
    "description": "Prompts with different salts share no blocks of the prefix cache.",
    "schema": {"type": "string", "maxLength": 256},
}
_TURNS = {"name": "turns", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999999}}
_TENANT = {"name": "tenant_id", "in": "path", "required": True, "schema": {"type": "string"}}
_MODEL = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    success: int = 200


OPERATIONS = {
    "chat": Operation("POST", CHAT_PATH, "Answer a chat.", ChatFields, (_SESSION, _SALT)),
    "completion": Operation("POST", COMPLETIONS_PATH, "Continue a text.", CompletionFields, (_SESSION, _SALT)),
    "list_models": Operation("GET", "/v1/models", "The models served: one."),
    "show_model": Operation("GET", "/v1/models/{name:path}", "One model.", parameters=(_MODEL,)),
    "healthz": Operation("GET", "/healthz", "This process answers."),
    "readyz": Operation("GET", "/readyz", "Every engine serves."),
    "metrics": Operation("GET", "/metrics", "All processes' metrics, for Prometheus."),
    "status": Operation("GET", "/wisp/status", "Replicas, splits, sessions and decisions."),
    "recording": Operation("GET", "/wisp/recording", "Snapshots and finished turns.", parameters=(_TURNS,)),
    "list_tenants": Operation("GET", "/wisp/tenants", "Every tenant: limits and usage."),
    "add_tenant": Operation("POST", "/wisp/tenants", "A new tenant; only this shows its key.", NewTenant, success=201),
    "limit_tenant": Operation("PATCH", "/wisp/tenants/{tenant_id}", "Other limits.", TenantLimits, (_TENANT,)),
    "remove_tenant": Operation(
        "DELETE", "/wisp/tenants/{tenant_id}", "The end of a tenant and its keys.", None, (_TENANT,), success=204
    ),
    "rotate_key": Operation(
        "POST", "/wisp/tenants/{tenant_id}/rotate", "A new key; only this shows it.", Rotation, (_TENANT,)
    ),
}


def routes(**endpoints: Callable[[Request], Awaitable[Response]]) -> list[Route]:
    """The routes of the operations of these names."""
    named = ((OPERATIONS[name], endpoint) for name, endpoint in endpoints.items())
    return [Route(one.path, endpoint, methods=[one.method]) for one, endpoint in named]


def openapi() -> dict[str, Any]:
    """The whole document, made of the models that validate requests."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS.values():
        paths.setdefault(one.path.replace(":path", ""), {})[one.method.lower()] = _described(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "WiSP", "version": "1"},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _described(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    """One operation; the models of its body are added to ``schemas``."""
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {str(operation.success): {"description": "Done."}}
        | {code: {"description": why} for code, why in _ERRORS.items()},
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        schema = operation.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[operation.body.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return described
