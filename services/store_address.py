"""Where a service's store is, for the processes that connect to it: no password in it, only the file that holds one.

Serve keeps the arguments of its deployments, so they carry this and not the secret. On several hosts the file has to
be at the same path on each.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from pydantic import Field

from services.config import Section
from wisp_core.errors import ConfigurationError, StoreUnavailableError
from wisp_core.store.redis_store import RedisStore

CHECK_TIMEOUT_S = 2.0
"""What a start waits for the store's answer, at most."""


class StoreAddress(Section):
    """JSON, as Serve passes it on."""

    url: str = Field(description="redis://, rediss:// or unix:// URL without a password.")
    password_file: Path | None = Field(default=None, description="File that holds the password.")
    service: str = Field(description="Name of the service, part of every key.")
    timeout_s: float = Field(default=0.2, gt=0, description="Longest wait for a connection and for a reply, seconds.")

    def open(self, timeout_s: float | None = None, *, is_needed: bool = False) -> RedisStore:
        """A new client, for the event loop that uses it; ``timeout_s`` in place of the address's own."""
        password = None if self.password_file is None else self.password_file.read_text().strip()
        return RedisStore(
            self.url, self.service, password=password, timeout_s=timeout_s or self.timeout_s, is_needed=is_needed
        )

    async def check(self) -> None:
        """Raises ConfigurationError in the store's words, unless it answers, takes writes and runs scripts."""
        store = self.open(CHECK_TIMEOUT_S, is_needed=True)
        try:
            await store.ping()
        except StoreUnavailableError as error:
            raise ConfigurationError(
                f"redis.url: {error}. It has to be one server (no cluster) that takes writes and scripts; a password "
                "goes into the URL (redis://:PASSWORD@HOST:6379/0). Without redis.url the service runs a Valkey of its "
                "own"
            ) from error
        finally:
            await store.close()


def without_password(url: str) -> tuple[str, str | None]:
    """``url`` without its password, and the password if it has one."""
    parts = urlsplit(url)
    if parts.password is None:
        return url, None
    user = f"{quote(unquote(parts.username), safe='')}@" if parts.username else ""
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=user + host)), unquote(parts.password)
