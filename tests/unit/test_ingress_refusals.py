"""What is refused costs the service little, and its tenant a request; bodies wait in bounded number."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from typing import Any

import pytest
from ingress_in_process import ANSWER, HEAD, KEY, OTHER_KEY, Reply, Service
from pydantic import ValidationError

from services.ingress import request_fields
from services.ingress.chat_fields import MAX_PARTS, MAX_SCHEMA_BYTES, MAX_TOOL_CALLS
from services.ingress.errors import ApiError
from services.ingress.gateway import PARSED_HERE_BYTES
from services.ingress.request_fields import CHAT_PATH, COMPLETIONS_PATH, MAX_NAMED_ERRORS, parse
from services.ingress.turn import Arrival

NEVER = 5.0
"""Seconds that no test waits: a body that comes this late is not read."""


async def send(service: Service, *body: bytes | float, key: str = KEY) -> Reply:
    headers = {"authorization": f"Bearer {key}"}
    return await service.request(COMPLETIONS_PATH, list(body), method="POST", headers=headers)


async def test_each_refused_request_is_one_of_its_tenant_s() -> None:
    service = Service(requests_per_minute=5)
    assert (await service.chat(temperature=9)).status == 400
    assert (await service.chat(model="gpt-9")).status == 404
    assert (await service.chat(headers={"x-session-id": "no id"})).status == 400
    assert (await send(service, *[b"x" * 4000] * 5)).status == 413
    assert (await send(service, b"{", NEVER)).status == 408
    reply = await service.chat()
    assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "requests", "12")
    shown = service.telemetry.scrape()
    for status, count in (("400", 2), ("404", 1), ("413", 1), ("408", 1), ("429", 1)):
        assert f'wisp_ingress_turns_total{{status="{status}",tenant="a"}} {count}.0' in shown
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat(headers={"authorization": f"Bearer {OTHER_KEY}"})).status == 200
    assert not service.store._turns["a"], "a refused request holds no place"


async def test_no_body_is_read_of_a_tenant_that_has_no_request_left() -> None:
    service = Service(requests_per_minute=1)
    assert (await send(service, b"no json")).status == 400
    assert (await send(service, b"no json")).status == 429, "this one was read"
    reply = await send(service, NEVER, b"{}")
    assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "requests", "60")
    assert 'wisp_ingress_turns_total{status="429",tenant="a"} 2.0' in service.telemetry.scrape()
    await service.tenants.refresh()
    assert (await service.admin("/wisp/tenants/a", "PATCH", requests_per_minute=100)).status == 200
    assert (await service.chat()).headers["retry-after"] == "1", "a limit that was raised holds at once"


async def test_no_more_bodies_wait_than_their_tenant_may_have_turns() -> None:
    service = Service(max_concurrent_turns=2)
    waiting = [asyncio.create_task(send(service, b"{", 0.1, b"}")) for _ in range(2)]
    await asyncio.sleep(0.02)
    reply = await send(service, NEVER, b"{}")
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert "concurrent turns: limit 2" in reply.error["message"]
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]] * 2
    assert (await service.chat(headers={"authorization": f"Bearer {OTHER_KEY}"})).status == 200
    assert [reply.status for reply in await asyncio.gather(*waiting)] == [400, 400]
    assert (await service.chat()).status == 200


async def test_clients_that_leave_while_their_body_is_read_make_room() -> None:
    service = Service(max_concurrent_turns=1)
    leaving = asyncio.create_task(send(service, b"{", NEVER))
    await asyncio.sleep(0.02)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200


async def leave(service: Service, *body: bytes | float, after_s: float = 0.02) -> None:
    """Send a request, and have its task cancelled as the server does when it stops."""
    leaving = asyncio.create_task(send(service, *body))
    await asyncio.sleep(after_s)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await service.gateway.drain()


LARGE = json.dumps({"model": "tiny", "prompt": "x" * PARSED_HERE_BYTES, "max_tokens": 1}).encode()


async def test_a_client_that_leaves_has_sent_a_request_wherever_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(requests_per_minute=5, tokens_per_minute=1_000_000, max_body_bytes=1 << 20)
    parse_at_once, is_parsing = request_fields.parse, threading.Event()

    def parse_slowly(path: str, raw: bytes) -> Any:
        is_parsing.wait(NEVER)
        return parse_at_once(path, raw)

    await leave(service, b"{", NEVER)  # while its body comes
    assert (await service.request(COMPLETIONS_PATH, [b"{", None], method="POST")).status == 499
    with monkeypatch.context() as patch:
        patch.setattr(request_fields, "parse", parse_slowly)
        await leave(service, LARGE)  # while its body is parsed
        is_parsing.set()
    forever = asyncio.Event()
    service.handle.scripts = [[HEAD, forever.wait]]
    await leave(service, json.dumps({"model": "tiny", "prompt": "x"}).encode())  # while its turn runs
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200
    reply = await service.chat()
    assert (reply.status, reply.error["type"]) == (429, "requests")
    assert 'wisp_ingress_turns_total{status="499",tenant="a"} 4.0' in service.telemetry.scrape()


async def test_a_fault_of_ours_takes_a_request_too(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(requests_per_minute=1)
    with monkeypatch.context() as patch:
        patch.setattr(request_fields, "parse", lambda path, raw: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await service.chat()
    await service.gateway.drain()
    assert (await service.chat()).status == 429


async def test_a_body_whose_client_has_left_keeps_its_place_until_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(max_concurrent_turns=2, tokens_per_minute=1_000_000, max_body_bytes=1 << 20)
    began, may_end, at_once = list[str](), threading.Event(), list[int]()

    def parse_slowly(path: str, raw: bytes) -> Any:
        began.append(path)
        at_once.append(1)
        may_end.wait(NEVER)
        assert at_once.pop() == 1
        assert not at_once, "one at a time"
        raise ApiError(400, "no")

    monkeypatch.setattr(request_fields, "parse", parse_slowly)
    await leave(service, LARGE)
    other = asyncio.create_task(send(service, LARGE))
    await asyncio.sleep(0.02)
    assert len(began) == 1
    assert (await service.chat()).error["message"].startswith("Rate limit reached on concurrent turns")
    may_end.set()
    assert (await other).status == 400
    assert len(began) == 2
    assert not service.gateway._limiter._arriving["a"]


async def test_tenants_take_turns_with_their_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    service, ended = Service(tokens_per_minute=1_000_000, max_body_bytes=1 << 20), list[str]()

    def parse_slowly(path: str, raw: bytes) -> Any:
        time.sleep(0.01)
        raise ApiError(400, "no")

    async def end(key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        assert (await service.request(COMPLETIONS_PATH, LARGE, method="POST", headers=headers)).status == 400
        ended.append(key)

    monkeypatch.setattr(request_fields, "parse", parse_slowly)
    await asyncio.gather(*[end(key) for key in [KEY] * 20 + [OTHER_KEY]])
    assert ended.index(OTHER_KEY) <= 3
    assert not service.gateway._large_body.locked()
    assert not any(lock.locked() for lock in service.gateway._large_body_of.values())


@pytest.mark.parametrize("body", [LARGE, b'{"model": "tiny", "prompt": "x"}'], ids=["faulty", "refused"])
async def test_an_error_that_nobody_waits_for_is_not_logged(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    service, logged = Service(max_body_bytes=1 << 20), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))

    def parse_slowly(path: str, raw: bytes) -> Any:
        time.sleep(0.1)
        raise ApiError(400, "no")

    async def refuse_slowly(*_: object, **__: object) -> None:
        await asyncio.sleep(0.1)
        raise ApiError(429, "no")

    if body is LARGE:
        monkeypatch.setattr(request_fields, "parse", parse_slowly)
    monkeypatch.setattr(service.gateway._limiter, "admit", refuse_slowly)
    await leave(service, body)
    await asyncio.sleep(0.2)
    gc.collect()
    assert logged == []


async def test_one_turn_too_many_takes_a_request_before_its_body_is_read() -> None:
    service = Service(max_concurrent_turns=1, requests_per_minute=3)
    waiting = asyncio.create_task(send(service, b"{", 0.1, b"}"))
    await asyncio.sleep(0.02)
    assert [(await send(service, b"{}")).error["message"].split(":")[0] for _ in range(4)] == [
        "Rate limit reached on concurrent turns"
    ] * 3 + ["Rate limit reached on requests per min"]
    assert (await waiting).status == 429, "none is left for this one either"


@pytest.mark.parametrize("is_large", [False, True])
async def test_large_bodies_are_parsed_beside_the_event_loop_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    service, threads, at_once = Service(tokens_per_minute=1_000_000), list[threading.Thread](), list[int]()

    def parse_slowly(path: str, raw: bytes) -> Any:
        threads.append(threading.current_thread())
        at_once.append(1)
        time.sleep(0.02)
        assert at_once == [1]
        at_once.clear()
        return parse(path, raw)

    monkeypatch.setattr(request_fields, "parse", parse_slowly)
    text = "x" * (PARSED_HERE_BYTES if is_large else 10)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()
    tenant = await service.gateway.authenticate({"authorization": f"Bearer {KEY}"})
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]] * 3
    turns = [asyncio.create_task(service.gateway.turn(CHAT_PATH, {}, body, Arrival(tenant))) for _ in range(3)]
    assert [reply.status for reply in await asyncio.gather(*turns)] == [200] * 3
    await service.gateway.drain()
    assert [thread is not threading.main_thread() for thread in threads] == [is_large] * 3


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS_PATH, {"prompt": [{}] * 1000}),
        (COMPLETIONS_PATH, {"prompt": [-1] * 1000}),
        (COMPLETIONS_PATH, {"prompt": [[1]] * 1000}),
        (COMPLETIONS_PATH, {"prompt": [["a"] * 1000] * 30}),
        (COMPLETIONS_PATH, {"prompt": "x", "stop": [1] * 1000}),
        (COMPLETIONS_PATH, {"prompt": "x", "logit_bias": {f"x{number}": 1 for number in range(1000)}}),
        (CHAT_PATH, {"messages": [{"a": {}}] * 1000}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{}] * 200}] * 5}),
        (CHAT_PATH, {"messages": [{"role": "assistant", "tool_calls": [{}] * 1000}]}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * 1000}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}], "modalities": [1] * 1000}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}], "metadata": {str(n): n for n in range(1000)}}),
    ],
)
def test_what_is_long_and_wrong_is_refused_at_its_first_fault(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    faults: list[int] = []
    refuse = request_fields._refuse

    def count(error: ValidationError) -> None:
        faults.append(error.error_count())
        refuse(error)

    monkeypatch.setattr(request_fields, "_refuse", count)
    with pytest.raises(ApiError, match=r"Invalid value|Missing"):
        parse(path, json.dumps({"model": "m", **fields}).encode())
    assert faults[0] <= 5


def test_too_many_messages_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_fields, "_clean_message", lambda index, message: pytest.fail("looked at one"))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}] * 4097}
    with pytest.raises(ApiError, match="at most 4096 items"):
        parse(CHAT_PATH, json.dumps(body).encode())


def test_a_great_many_unknown_fields_are_not_listed() -> None:
    message = {"role": "user", "content": "x", **{f"x{number}": 1 for number in range(MAX_NAMED_ERRORS + 1)}}
    with pytest.raises(ApiError, match="has 101 unknown parameters") as caught:
        parse(CHAT_PATH, json.dumps({"model": "m", "messages": [message]}).encode())
    assert caught.value.status == 400


TEXT = {"type": "text", "text": "x"}
CALLED = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("field", "message", "number", "most"),
    [
        ("content", {"role": "user", "content": [TEXT] * 256}, 1280, MAX_PARTS),
        ("tool_calls", {"role": "assistant", "tool_calls": [CALLED] * 128}, 1152, MAX_TOOL_CALLS),
    ],
)
def test_lists_of_all_messages_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, field: str, message: dict[str, Any], number: int, most: int
) -> None:
    num_messages = number // len(message[field])
    fits = {"model": "m", "messages": [message] * (num_messages - 1)}
    assert len(parse(CHAT_PATH, json.dumps(fits).encode()).body["messages"]) == num_messages - 1
    monkeypatch.setattr(request_fields, "_clean_message", lambda index, message: pytest.fail("looked at one"))
    with pytest.raises(ApiError) as caught:
        parse(CHAT_PATH, json.dumps({"model": "m", "messages": [message] * num_messages}).encode())
    assert caught.value.error["param"] == "messages"
    assert f"{number} " in str(caught.value)
    assert f"('messages[].{field}') in all, at most {most} fit" in str(caught.value)


def test_schemas_that_make_one_grammar_are_bounded_together() -> None:
    schema = {"type": "object", "description": "x" * (MAX_SCHEMA_BYTES // 2)}
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": schema}} for number in range(2)]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    parse(CHAT_PATH, json.dumps({**body, "tool_choice": "auto"}).encode())
    with pytest.raises(ApiError, match=f"at most {MAX_SCHEMA_BYTES} bytes") as caught:
        parse(CHAT_PATH, json.dumps({**body, "tool_choice": "required"}).encode())
    assert (caught.value.status, caught.value.error["param"]) == (400, "tools")


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], ["x", [1]], 5, ["x"] * 33])
def test_a_prompt_of_no_kind_is_told_all_kinds(prompt: Any) -> None:
    with pytest.raises(ApiError, match="'prompt': text, token ids, or 1 to 32 of either, no token ids empty") as caught:
        parse(COMPLETIONS_PATH, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert (caught.value.status, caught.value.error["param"]) == (400, "prompt")
