"""The service's interface as an OpenAPI document, made of the models that validate requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

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
_TURNS = {"name": "turns", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999999}}
_TENANT = {"name": "tenant_id", "in": "path", "required": True, "schema": {"type": "string"}}
_MODEL = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def openapi() -> dict[str, Any]:
    """The whole document."""
    schemas: dict[str, Any] = {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "WiSP", "version": "1"},
        "security": [{"key": []}],
        "paths": {
            CHAT_PATH: {"post": _operation("Answer a chat.", schemas, ChatFields, parameters=[_SESSION])},
            COMPLETIONS_PATH: {
                "post": _operation("Continue a text.", schemas, CompletionFields, parameters=[_SESSION])
            },
            "/v1/models": {"get": _operation("The models served.", schemas)},
            "/v1/models/{name}": {"get": _operation("One model.", schemas, parameters=[_MODEL])},
            "/healthz": {"get": _operation("This process answers.", schemas)},
            "/readyz": {"get": _operation("Every engine serves.", schemas)},
            "/wisp/status": {"get": _operation("Replicas, splits, sessions.", schemas)},
            "/wisp/recording": {"get": _operation("Snapshots and finished turns.", schemas, parameters=[_TURNS])},
            "/wisp/tenants": {
                "get": _operation("Every tenant.", schemas),
                "post": _operation("A new tenant.", schemas, NewTenant, success="201"),
            },
            "/wisp/tenants/{tenant_id}": {
                "patch": _operation("Other limits.", schemas, TenantLimits, parameters=[_TENANT]),
                "delete": _operation("The end of a tenant.", schemas, success="204", parameters=[_TENANT]),
            },
            "/wisp/tenants/{tenant_id}/rotate": {
                "post": _operation("A new key.", schemas, Rotation, parameters=[_TENANT])
            },
        },
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(
    summary: str,
    schemas: dict[str, Any],
    body: type[BaseModel] | None = None,
    *,
    success: str = "200",
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One operation; the models of ``body`` are added to ``schemas``."""
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {success: {"description": "Done."}}
        | {code: {"description": why} for code, why in _ERRORS.items()},
    }
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return operation
