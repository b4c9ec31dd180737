"""Turns through the ingress: tried again while nothing was sent, ended when a client leaves, charged for their use."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from ingress_in_process import ANSWER, EVENTS, HEAD, KEY, Service
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from services.ingress import request_fields
from services.ingress.replicas import MAX_ATTEMPTS
from services.ingress.request_fields import TurnFields, parse
from services.ingress.turn import Arrival
from wisp_core.errors import EngineUnavailableError
from wisp_core.store.interface import Admission


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        [RayActorError()],
        [EngineUnavailableError("gone")],
        [HEAD, RayActorError()],
        [RuntimeError("Unexpected error (StatusCode.UNKNOWN): Stream removed.")],
        [{**HEAD, "status": 503}, b"{}"],
    ],
)
async def test_a_turn_that_has_sent_nothing_is_tried_again(
    service: Service, failure: list[Any], is_stream: bool
) -> None:
    good = [HEAD, *EVENTS] if is_stream else [HEAD, json.dumps(ANSWER).encode()]
    service.handle.scripts = [list(failure), good]
    reply = await service.chat(stream=is_stream)
    assert reply.status == 200
    first, second = service.handle.calls
    assert first.is_cancelled
    assert first.arguments == second.arguments, "the router knows by the turn's id where it was"
    (record,) = await service.store.list_turns(10)
    assert not record.is_failed
    assert 'wisp_ingress_retries_total{tenant="a"} 1.0' in service.telemetry.scrape()


async def test_an_unstreamed_answer_lost_halfway_is_repeated(service: Service) -> None:
    whole = json.dumps(ANSWER).encode()
    lost = [HEAD, whole[:10], RayActorError()]
    service.handle.scripts = [lost, [RayActorError()], lost, [HEAD, whole]]
    reply = await service.chat()
    assert (reply.status, json.loads(reply.body)) == (200, ANSWER)
    assert 'wisp_ingress_retries_total{tenant="a"} 3.0' in service.telemetry.scrape()


async def test_an_answer_that_comes_whole_with_its_head_waits_for_nothing_more(service: Service) -> None:
    whole = json.dumps(ANSWER).encode()
    head = {**HEAD, "headers": {"content-length": str(len(whole))}, "first": whole}
    has_ended = asyncio.Event()

    async def end() -> bytes:
        await asyncio.sleep(0.05)
        has_ended.set()
        raise RayActorError

    service.handle.scripts = [[head, end]]
    reply = await service.chat()
    assert (reply.status, json.loads(reply.body)) == (200, ANSWER)
    assert not has_ended.is_set()
    await asyncio.wait_for(has_ended.wait(), 5)
    assert not service.handle.calls[0].is_cancelled, "the replica's turn has ended, its client has not gone"


async def test_attempts_are_bounded_and_end_in_503(service: Service) -> None:
    service.handle.scripts = [[RayActorError()] for _ in range(MAX_ATTEMPTS)]
    reply = await service.chat(stream=True)
    assert reply.status == 503
    assert reply.headers["retry-after"] == "2"
    assert reply.error["code"] == "service_unavailable"
    assert len(service.handle.calls) == MAX_ATTEMPTS
    (record,) = await service.store.list_turns(10)
    assert record.is_failed


async def test_a_bug_in_a_replica_is_not_tried_again(service: Service) -> None:
    service.handle.scripts = [[RuntimeError("a bug")]]
    with pytest.raises(RuntimeError, match="a bug"):
        await service.chat()
    assert len(service.handle.calls) == 1


async def test_a_turn_leaves_the_gauge_whatever_the_store_says(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def settle(*_: object) -> None:
        raise ValueError("an answer that nobody understands")

    monkeypatch.setattr(service.store, "settle", settle)
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200
    assert 'wisp_ingress_running_turns{tenant="a"} 0.0' in service.telemetry.scrape()


async def test_no_replica_at_all_is_503(service: Service) -> None:
    service.handle.scripts = [[DeploymentUnavailableError(DeploymentID("Replica", "wisp"))]]
    reply = await service.chat()
    assert (reply.status, reply.headers["retry-after"]) == (503, "10")


async def test_a_bug_behind_a_stream_ends_it_with_an_error_event_and_counts_as_failed(service: Service) -> None:
    service.handle.scripts = [[HEAD, EVENTS[0], KeyError("prompt of somebody")]]
    reply = await service.chat(stream=True)
    last = reply.body.removeprefix(EVENTS[0])
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"somebody" not in reply.body
    (record,) = await service.store.list_turns(10)
    assert record.is_failed


async def test_a_stream_that_breaks_ends_with_an_error_event(service: Service) -> None:
    two = {"choices": [{"index": 0, "delta": {"content": "i"}}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    service.handle.scripts = [[HEAD, EVENTS[0], b"data: " + json.dumps(two).encode() + b"\n\n", RayActorError()]]
    reply = await service.chat(stream=True)
    assert reply.status == 200
    first, second, last = reply.body.removesuffix(b"\n\n").split(b"\n\n")
    assert first + b"\n\n" == EVENTS[0]
    assert json.loads(second.removeprefix(b"data: "))["choices"] == two["choices"]
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"[DONE]" not in reply.body
    (record,) = await service.store.list_turns(10)
    assert (record.is_failed, record.completion_tokens) == (True, 2)
    assert 'wisp_ingress_broken_streams_total{reason="replica_lost",tenant="a"} 1.0' in service.telemetry.scrape()


async def test_a_client_that_leaves_cancels_its_turn_and_gets_unused_tokens_back() -> None:
    service = Service(tokens_per_minute=520)
    is_waiting = asyncio.Event()
    service.handle.scripts = [[HEAD, EVENTS[0], EVENTS[1], is_waiting.wait], [HEAD, *EVENTS]]
    await service.chat(stream=True, max_tokens=400, leaves_after=1)
    assert service.handle.calls[0].is_cancelled
    reply = await service.chat(stream=True, max_tokens=400)
    assert reply.status == 200
    assert 'status="499"' in service.telemetry.scrape()


async def test_a_client_that_leaves_while_the_answer_starts_cancels_its_turn(service: Service) -> None:
    forever = asyncio.Event()
    service.handle.scripts = [[HEAD, EVENTS[0], forever.wait]]

    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    tenant = await service.gateway.authenticate({"authorization": f"Bearer {KEY}"})
    reply = await service.gateway.turn("/v1/chat/completions", {}, body, Arrival(tenant))
    assert not isinstance(reply.body, bytes)
    await reply.body.aclose()
    await service.gateway.drain()
    assert service.handle.calls[0].is_cancelled
    assert len(await service.store.list_turns(10)) == 1


async def test_a_client_that_leaves_while_its_turn_is_admitted_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(max_concurrent_turns=1)
    admit, is_counted = service.store.admit, asyncio.Event()

    async def admit_slowly(*arguments: Any) -> Admission:
        admission = await admit(*arguments)
        is_counted.set()
        await asyncio.sleep(0.05)
        return admission

    with monkeypatch.context() as patch:
        patch.setattr(service.store, "admit", admit_slowly)
        leaving = asyncio.create_task(service.chat())
        await is_counted.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    await service.gateway.drain()
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200


async def test_leaving_an_unstreamed_turn_is_no_way_around_the_quota() -> None:
    service = Service(tokens_per_minute=600)
    forever = asyncio.Event()
    service.handle.scripts = [[HEAD, forever.wait]]
    tenant = await service.gateway.authenticate({"authorization": f"Bearer {KEY}"})
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400}).encode()
    turn = asyncio.create_task(service.gateway.turn("/v1/chat/completions", {}, body, Arrival(tenant)))
    await asyncio.sleep(0.05)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    await service.gateway.drain()
    assert service.handle.calls[0].is_cancelled
    assert (await service.chat(max_tokens=400)).status == 429


async def test_blanks_do_not_teach_prompts_that_cost_next_to_nothing() -> None:
    service = Service(tokens_per_minute=1_000_000, requests_per_minute=1000)
    taught = json.dumps({**ANSWER, "usage": {"prompt_tokens": 100, "completion_tokens": 1}}).encode()
    for _ in range(60):
        service.handle.scripts = [[HEAD, taught]]
        assert (await service.chat(messages=[{"role": "user", "content": " " * 7600}], max_tokens=1)).status == 200
    await service.gateway.drain()
    forever = asyncio.Event()
    service.handle.scripts = [[HEAD, forever.wait]]
    tenant = await service.gateway.authenticate({"authorization": f"Bearer {KEY}"})
    message = {"role": "user", "content": "\N{LATIN SMALL LETTER E WITH ACUTE}" * 4000}
    body = json.dumps({"model": "tiny", "messages": [message], "max_tokens": 1, "stream": True}).encode()
    turn = asyncio.create_task(service.gateway.turn("/v1/chat/completions", {}, body, Arrival(tenant)))
    await asyncio.sleep(0.05)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    await service.gateway.drain()
    newest, *_ = await service.store.list_turns(1)
    assert newest.prompt_tokens >= 8000 / 8


async def test_a_turn_s_time_runs_from_when_its_body_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse_slowly(path: str, raw: bytes) -> TurnFields:
        time.sleep(0.2)
        return parse(path, raw)

    monkeypatch.setattr(request_fields, "parse", parse_slowly)
    service = Service()
    service.handle.scripts = [[HEAD, *EVENTS]]
    assert (await service.chat(stream=True)).status == 200
    await service.gateway.drain()
    (record,) = await service.store.list_turns(10)
    assert record.ttft_s is not None
    assert 0.2 <= record.ttft_s <= record.duration_s < 1.0


async def test_a_prompt_that_cannot_be_answered_costs_nothing() -> None:
    service = Service(tokens_per_minute=600)
    engine = json.dumps({"error": {"message": "too long"}}).encode()
    for _ in range(5):
        service.handle.scripts = [[{**HEAD, "status": 400}, engine]]
        assert (await service.chat(max_tokens=100_000)).status == 400


async def test_serving_goes_on_without_the_store(service: Service) -> None:
    service.store.is_available = False
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200


async def test_a_stream_left_early_is_charged_by_tokens_and_not_by_events() -> None:
    service = Service(tokens_per_minute=520)
    usage = {"prompt_tokens": 20, "completion_tokens": 300, "total_tokens": 320}
    many = {"choices": [{"index": 0, "delta": {"content": "three hundred tokens"}}], "usage": usage}
    forever = asyncio.Event()
    service.handle.scripts = [[HEAD, b"data: " + json.dumps(many).encode() + b"\n\n", forever.wait]]
    reply = await service.chat(stream=True, max_tokens=400, leaves_after=1)
    assert b"usage" not in reply.body
    assert (await service.chat(stream=True, max_tokens=250)).status == 429
    service.handle.scripts = [[HEAD, *EVENTS]]
    assert (await service.chat(stream=True, max_tokens=150)).status == 200
    (record, *_) = sorted(await service.store.list_turns(10), key=lambda one: -one.completion_tokens)
    assert (record.prompt_tokens, record.completion_tokens) == (20, 300)


ENGINE_FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_schema_that_the_engine_cannot_compile_is_the_client_s_error(service: Service, is_stream: bool) -> None:
    body = json.dumps(ENGINE_FAILED).encode()
    failed = [HEAD, b"data: " + body + b"\n\ndata: [DONE]\n\n"] if is_stream else [{**HEAD, "status": 500}, body]
    service.handle.scripts = [failed]
    reply = await service.chat(stream=is_stream, response_format=SCHEMA)
    assert (reply.status, reply.error["code"]) == (400, "invalid_json_schema")
    service.handle.scripts = [failed]
    assert (await service.chat(stream=is_stream)).status == 500, "without a schema it is the engine's error"


async def test_a_stream_whose_first_word_is_an_error_has_that_status(service: Service) -> None:
    error = {"error": {"message": "temperature is odd", "type": "BadRequestError", "param": "temperature", "code": 400}}
    service.handle.scripts = [[HEAD, b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"]]
    reply = await service.chat(stream=True)
    assert (reply.status, reply.error["param"]) == (400, "temperature")
    assert service.handle.calls[0].is_cancelled


async def test_a_schema_that_fails_after_the_first_event_ends_the_stream_with_the_client_s_error(
    service: Service,
) -> None:
    service.handle.scripts = [[HEAD, EVENTS[0], b"data: " + json.dumps(ENGINE_FAILED).encode() + b"\n\n"]]
    reply = await service.chat(stream=True, response_format=SCHEMA)
    last = reply.body.removeprefix(EVENTS[0]).removeprefix(b"data: ")
    assert json.loads(last)["error"]["code"] == "invalid_json_schema"
    (record,) = await service.store.list_turns(10)
    assert not record.is_failed
