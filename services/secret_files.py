"""Secrets of one service: files in its state directory that only the operator can read."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from services.config import ServiceConfig, TenantSettings
from wisp_core.errors import ConfigurationError
from wisp_core.tenant_contracts import TenantLimits, TenantSpec

logger = logging.getLogger(__name__)

LEAST_CHARACTERS = 16
"""Shorter secrets are guessed: every one admits to the whole service, or to all that a tenant may do."""


@dataclass(frozen=True, kw_only=True)
class ServiceSecrets:
    """What the parts of a service must know and nobody else."""

    admin_key: str
    metrics_key: str
    """For Prometheus: opens the metrics only."""
    cache_salt_key: str
    redis_password: str

    @classmethod
    def load(cls, state_dir: Path) -> ServiceSecrets:
        """Read the secrets below ``state_dir``, and create those that are missing."""
        return cls(
            admin_key=read_or_create(secret_path(state_dir, "admin")),
            metrics_key=read_or_create(secret_path(state_dir, "metrics")),
            cache_salt_key=read_or_create(secret_path(state_dir, "cache-salt")),
            redis_password=read_or_create(secret_path(state_dir, "redis")),
        )


def secret_path(state_dir: Path, name: str) -> Path:
    """File of the secret ``name``: ``admin``, ``metrics``, ``cache-salt``, ``redis`` or ``redis-url``."""
    return state_dir.resolve() / "secrets" / f"{name}.key"


def read_or_create(path: Path) -> str:
    """The secret in ``path``; a new one is written, mode 0600, if there is none. Raises ConfigurationError."""
    if path.exists() and not path.is_file():
        raise ConfigurationError(f"{path} is no file: name one that holds the secret, or one that is to be made")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            _write_new(path, secrets.token_urlsafe(32))
        _tighten(path)
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    if not secret:
        raise ConfigurationError(f"{path} is empty: delete it, or write the secret into it")
    if len(secret) < LEAST_CHARACTERS:
        raise ConfigurationError(
            f"{path} holds {len(secret)} characters: give a secret of {LEAST_CHARACTERS} or more, or delete the file "
            "for a new one"
        )
    return secret


def replace_secret(path: Path, secret: str) -> None:
    """Write ``secret`` into ``path``, mode 0600; readers see the old one or the new one. Raises ConfigurationError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _draft(path, secret).replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def _write_new(path: Path, secret: str) -> None:
    # Linked into place when complete, so that two processes that start at once agree on one secret.
    draft = _draft(path, secret)
    try:
        path.hardlink_to(draft)
    finally:
        draft.unlink()


def _draft(path: Path, secret: str) -> Path:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # threads of one process write, too
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
    return draft


def _tighten(path: Path) -> None:
    """Take the secret away from everybody but its owner; somebody else's file is only reported."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077 == 0:
        return
    try:
        path.chmod(mode & 0o700)
        logger.warning("%s was open to others (mode %o): closed, but its secret may be known", path, mode)
    except PermissionError:
        logger.warning("%s is open to others (mode %o) and belongs to another user", path, mode)


def tenant_spec(tenant: TenantSettings) -> TenantSpec:
    """What the store keeps of a declared tenant; a missing key file is created."""
    key_sha256 = tenant.key_sha256
    if tenant.key_file is not None:
        key_sha256 = hashlib.sha256(read_or_create(tenant.key_file).encode()).hexdigest()
    assert key_sha256 is not None, "TenantSettings has exactly one of key_sha256 and key_file"
    return TenantSpec(
        tenant_id=tenant.tenant_id,
        key_sha256=(key_sha256,),
        isolation=tenant.isolation,
        is_from_file=True,
        **tenant.model_dump(include=set(TenantLimits.model_fields)),
    )


def tenant_specs(config: ServiceConfig) -> list[TenantSpec]:
    """Every tenant that the configuration declares. Raises ConfigurationError that names the key file's setting."""
    specs = []
    for index, tenant in enumerate(config.tenants):
        try:
            specs.append(tenant_spec(tenant))
        except ConfigurationError as error:
            raise ConfigurationError(f"tenants.{index}.key_file: {error}") from error
    return specs
