"""Only a write that was sent, and whose answer did not come, may have run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from wisp_core.errors import StoreUnavailableError
from wisp_core.store.redis_store import RedisStore
from wisp_core.tenant_contracts import TenantSpec

TENANT = TenantSpec(tenant_id="a", key_sha256=("0" * 64,))
WRITES: list[Callable[[RedisStore], Awaitable[object]]] = [
    lambda store: store.write_tenant(TENANT),
    lambda store: store.delete_tenant("a"),
    lambda store: store.acquire_lease("policy", "me", 5.0),
]
READS: list[Callable[[RedisStore], Awaitable[object]]] = [
    lambda store: store.list_tenants(),
    lambda store: store.list_tenant_usage(),
    lambda store: store.list_sessions(5),
    lambda store: store.list_turns(5),
]


async def may_have_run(port: int, call: Callable[[RedisStore], Awaitable[object]]) -> bool:
    store = RedisStore(f"redis://127.0.0.1:{port}/0", "s")
    try:
        with pytest.raises(StoreUnavailableError) as caught:
            await call(store)
    finally:
        await store.close()
    return caught.value.may_have_run


async def _answer_greetings_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that goes as soon as it is asked for more than redis-py asks of a new connection."""
    while (asked := await reader.read(4096)) and (b"HELLO" in asked or b"CLIENT" in asked or b"SELECT" in asked):
        writer.write(b"%0\r\n" if b"HELLO" in asked else b"+OK\r\n" * asked.count(b"*"))
    writer.close()


async def test_where_nothing_listens_nothing_has_run() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert not any([await may_have_run(port, call) for call in [*WRITES, *READS]])


async def test_of_a_server_that_goes_only_a_write_may_have_run() -> None:
    server = await asyncio.start_server(_answer_greetings_only, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert [await may_have_run(port, call) for call in WRITES] == [True] * len(WRITES)
        assert [await may_have_run(port, call) for call in READS] == [False] * len(READS)
