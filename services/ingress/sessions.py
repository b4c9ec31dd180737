"""Who a turn belongs to: tenant, user and session in one key, the cache salt, and the turn's own id."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from urllib.parse import quote

from services.ingress.errors import bad_request
from wisp_core.store.usage import SINGLE_TURN

SESSION_HEADER = "x-session-id"
SALT_HEADER = "x-cache-salt"

_SESSION = re.compile(r"[A-Za-z0-9._:@=+~-]{1,128}")


@dataclass(frozen=True)
class Session:
    """Keys of one turn. Separators inside a part are escaped, so no tenant can name another's."""

    tenant_id: str
    session_id: str
    """As the client named it; "": it did not."""
    session_key: str
    user_key: str


def identify(tenant_id: str, user: str, session_header: str | None) -> Session:
    """Name the session of a turn.

    Without a session header all turns of a user are one session, and a turn without either is one of its own, which no
    client can name. Raises ApiError (400) for a header that is no id.
    """
    if session_header is not None and not _SESSION.fullmatch(session_header):
        raise bad_request(f"'{SESSION_HEADER}' must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ = + ~ -")
    user_key = f"{tenant_id}/{quote(user, safe='')}"
    last_part = session_header or ("" if user else SINGLE_TURN + secrets.token_hex(12))
    return Session(tenant_id, session_header or "", f"{user_key}/{last_part}", user_key)


def prompt_key(secret: str, tenant_id: str, body: Mapping[str, Any]) -> str:
    """The same for all of a tenant's chats that begin with one system prompt and offer the same tools; else "".

    Keyed, so that what is stored under it tells nobody the prompt; the ``@`` keeps it apart from users' keys.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return ""
    system = list(takewhile(lambda message: message.get("role") in ("system", "developer"), messages))
    if not system:
        return ""
    text = json.dumps([system, body.get("tools")], sort_keys=True).encode()
    return f"{tenant_id}/@{hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()[:32]}"


def cache_salt(secret: str, tenant_id: str, client_salt: str | None) -> str:
    """The salt of vLLM's prefix cache: no tenant can reach another's blocks, whatever salt it sends.

    Raises ApiError (400) when the client's salt is too long.
    """
    if client_salt is not None and len(client_salt) > 256:
        raise bad_request(f"'{SALT_HEADER}' must be at most 256 characters")
    message = tenant_id.encode() + b"\0" + (client_salt or "").encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def new_turn_id(tenant_id: str) -> str:
    """A request id that carries its tenant."""
    return f"{tenant_id}-{secrets.token_hex(12)}"
