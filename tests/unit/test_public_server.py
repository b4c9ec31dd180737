"""HTTP on the public port as clients write it, byte by byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from ingress_in_process import HEAD, KEY, Service
from public_servers import LAST, Named, Send, answers_to, serving, url_of, wait_until

from services.ingress.listener import Listener

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_client_that_leaves_before_its_answer_cancels_the_turn(listener: Listener) -> None:
    service = Service()
    service.handle.scripts = [[HEAD, lambda: asyncio.sleep(60)]]
    async with serving(listener, service.app), httpx.AsyncClient(base_url=url_of(listener)) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=CHAT, headers=headers, timeout=0.2)
        await wait_until(lambda: service.handle.calls[0].is_cancelled)
        await service.gateway.drain()
    assert 'wisp_ingress_turns_total{status="499",tenant="a"} 1.0' in service.telemetry.scrape()


async def test_what_is_no_http_is_refused_in_openai_s_form(listener: Listener) -> None:
    async with serving(listener, Service().app):
        for request in (b"GET no HTTP\r\n\r\n", b"GET /healthz HTTP/1.1\r\n" + LAST + b"x\r\n\r\n"):
            ((status, headers, body),) = await answers_to(listener, request)
            assert (status, headers["content-type"]) == (400, "application/json")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_url_may_name_the_host(listener: Listener) -> None:
    async with serving(listener, Service().app):
        for origin in (b"http://proxied.example:8000", b"HTTPS://[::1]", b""):
            request = b"GET " + origin + b"/v1/models%2Ftiny?x=http://y/ HTTP/1.1\r\n" + LAST
            ((status, _, body),) = await answers_to(listener, request + f"authorization: Bearer {KEY}\r\n\r\n".encode())
            assert (status, json.loads(body)["id"]) == (200, "tiny")
        ((status, _, _),) = await answers_to(listener, b"GET http://nothing HTTP/1.1\r\n" + LAST + b"\r\n")
        assert status == 404


async def test_head_is_answered_as_get_without_a_body(listener: Listener) -> None:
    service = Service()
    async with serving(listener, service.app):
        for path, expected in ((b"/healthz", 200), (b"/readyz", 503)):
            ((status, headers, body),) = await answers_to(listener, b"HEAD " + path + b" HTTP/1.1\r\n" + LAST + b"\r\n")
            assert (status, body) == (expected, b"")
            assert int(headers["content-length"]) > 0


async def test_a_body_of_two_lengths_is_refused_and_what_follows_is_not_read(listener: Listener) -> None:
    lengths = b"host: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    smuggled = b"GET /healthz HTTP/1.1\r\n" + LAST + b"\r\n"
    async with serving(listener, Service().app):
        ((status, headers, body),) = await answers_to(
            listener, b"POST /v1/completions HTTP/1.1\r\n" + lengths + b"0\r\n\r\n" + smuggled
        )
    assert (status, headers["connection"]) == (400, "close")
    assert "not both" in json.loads(body)["error"]["message"]


async def test_what_comes_after_an_early_answer_closes_quietly(listener: Listener) -> None:
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with serving(listener, Named("no")):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url_of(listener).rpartition(":")[2]))
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"zzz\r\n")
        assert (await reader.read()).endswith(b"no")
        writer.close()
    assert errors == []


class Echo(Named):
    """Answers each request with its body."""

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
            await asyncio.sleep(0)
        await Named(body.decode())(scope, receive, send)


async def test_what_is_parsed_in_turns_loses_nothing(listener: Listener) -> None:
    bodies = [str(number).encode() * length for number, length in enumerate((1, 1000, 1023, 200_000, 7, 1 << 20, 1))]
    pieces = list[bytes]()
    for number, body in enumerate(bodies):
        head = b"POST / HTTP/1.1\r\n" + (LAST if number == len(bodies) - 1 else b"host: x\r\n")
        if number % 2:
            chunks = [body[at : at + 700] for at in range(0, len(body), 700)]
            pieces += [head, b"transfer-encoding: chunked\r\n\r\n"]
            pieces += [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""]]
        else:
            pieces.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    async with serving(listener, Echo("")):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url_of(listener).rpartition(":")[2]))
        writer.write(b"".join(pieces))
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    for body in bodies:
        head, _, received = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert received[: len(body)] == body
        received = received[len(body) :]
    assert received == b""
