"""The public port: handed to each server in turn, none of its connections refused or cut."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from public_servers import Named, serving, url_of

from services.config import HttpSettings
from services.free_port import free_port
from services.ingress.listener import Listener, take_listener
from wisp_core.errors import ConfigurationError


@pytest.mark.parametrize("length", [0, 1 << 20])
async def test_who_comes_before_the_first_server_is_told_that_the_service_starts(tmp_path: Path, length: int) -> None:
    port = free_port()
    with closing(Listener(HttpSettings(port=port), tmp_path)) as listener:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=5) as client:
            for _ in range(3):
                answer = await client.post("/v1/completions", content=b"x" * length)
                assert (answer.status_code, int(answer.headers["retry-after"])) == (503, 5)
                assert answer.json()["error"]["message"] == "The service is starting."
            async with serving(listener, Named("first")):
                assert (await client.get("/")).text == "first"


async def test_a_client_that_comes_early_and_says_nothing_keeps_no_server_waiting(tmp_path: Path) -> None:
    port = free_port()
    with closing(Listener(HttpSettings(port=port), tmp_path)) as listener:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        async with asyncio.timeout(5):
            (await asyncio.to_thread(take_listener, listener.state_dir)).close()
        for _, writer in silent:
            writer.close()


async def test_a_connection_waits_for_the_next_server(listener: Listener) -> None:
    async with httpx.AsyncClient(base_url=url_of(listener), timeout=5) as client:
        asked = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        assert not asked.done()
        async with serving(listener, Named("late")):
            assert (await asked).text == "late"


async def test_clients_move_from_one_server_to_the_next_and_lose_nothing(listener: Listener) -> None:
    names, is_over = list[str](), False

    async def ask_on(client: httpx.AsyncClient) -> None:
        while not is_over:
            names.append((await client.get("/")).raise_for_status().text)
            await asyncio.sleep(0.001)

    async with (
        httpx.AsyncClient(base_url=url_of(listener), timeout=5) as one,
        httpx.AsyncClient(base_url=url_of(listener), timeout=5) as other,
    ):
        clients = [asyncio.create_task(ask_on(client)) for client in (one, other)]
        for turn in range(4):
            async with serving(listener, Named(f"server {turn}", delay_s=0.002)):
                await asyncio.sleep(0.05)
        async with serving(listener, Named("last")):
            is_over = True
            await asyncio.gather(*clients)
    assert sorted(set(names)) == ["last", "server 0", "server 1", "server 2", "server 3"]


async def test_a_server_stops_after_its_last_answer(listener: Listener) -> None:
    async with httpx.AsyncClient(base_url=url_of(listener), timeout=5) as client:
        async with serving(listener, Named("whole", delay_s=0.3)):
            asked = asyncio.create_task(client.get("/"))
            await asyncio.sleep(0.05)
        answer = await asked
    assert (answer.text, answer.headers["connection"]) == ("whole", "close")


_SERVER = """
import asyncio, sys
from pathlib import Path
from services.ingress.listener import take_listener
from services.ingress.server import PublicServer

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"some", "more_body": True})
    await asyncio.sleep(60)

asyncio.run(PublicServer(app, take_listener(Path(sys.argv[1])), max_header_bytes=2000).run())
"""


async def test_a_killed_server_takes_only_its_own_answers_with_it(listener: Listener) -> None:
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVER, str(listener.state_dir))
    async with httpx.AsyncClient(base_url=url_of(listener), timeout=20) as client:
        async with client.stream("GET", "/") as begun:
            assert begun.status_code == 200
            killed.kill()
            await killed.wait()
            with pytest.raises(httpx.HTTPError):
                await begun.aread()
        asked = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        assert not asked.done()
        async with serving(listener, Named("next")):
            assert (await asked).text == "next"


def test_signals_stay_ray_s(listener: Listener) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def run() -> None:
        async with serving(listener, Named("x")):
            await asyncio.sleep(0.05)
            assert signal.getsignal(signal.SIGTERM) is before

    asyncio.run(run())


def test_a_taken_socket_says_that_it_is_tcp(listener: Listener) -> None:
    # asyncio turns Nagle's algorithm off only then; answers would wait 40 ms for it.
    with take_listener(listener.state_dir) as taken:
        assert taken.proto == socket.IPPROTO_TCP


def test_a_closed_port_is_given_to_nobody(tmp_path: Path) -> None:
    Listener(HttpSettings(port=free_port()), tmp_path).close()
    with pytest.raises(FileNotFoundError):
        take_listener(tmp_path)


def test_a_long_directory_is_no_obstacle(tmp_path: Path) -> None:
    state_dir = tmp_path / ("long" * 40)
    listener = Listener(HttpSettings(port=free_port()), state_dir)
    take_listener(state_dir).close()
    listener.close()
    # A service that was killed leaves its socket behind.
    again = Listener(HttpSettings(port=free_port()), state_dir)
    take_listener(state_dir).close()
    again.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="state_dir"):
        Listener(HttpSettings(port=free_port()), tmp_path / "file")
