"""The ingress over raw ASGI: answers and errors in OpenAI's form, bounds, models, readiness and metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from ingress_in_process import ADMIN_KEY, ANSWER, EVENTS, HEAD, KEY, METRICS_KEY, Broadcast, Service
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from services.ingress import cluster, replicas
from services.ingress.cluster import Cluster
from services.ingress.sessions import cache_salt
from wisp_core.tenant_contracts import TurnRecord


@pytest.fixture
def service() -> Service:
    return Service()


async def test_a_whole_answer_passes_as_the_engine_gave_it(service: Service) -> None:
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    reply = await service.chat(user="ann", headers={"x-session-id": "s1", "x-cache-salt": "mine"})
    assert (reply.status, json.loads(reply.body)) == (200, ANSWER)
    assert reply.headers["x-session-id"] == "s1"
    arguments = service.handle.calls[0].arguments
    assert service.handle.session_ids == ["a/ann/s1"]
    assert (arguments["session_key"], arguments["user_key"], arguments["tenant"]) == ("a/ann/s1", "a/ann", "a")
    assert json.loads(arguments["body"])["cache_salt"] == cache_salt("salt", "a", "mine")
    assert arguments["headers"]["x-request-id"] == reply.headers["x-turn-id"]
    assert reply.headers["x-turn-id"].startswith("a-")


async def test_a_turn_is_recorded_with_what_the_engine_counted(service: Service) -> None:
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    await service.chat(headers={"x-session-id": "s1"})
    (usage,) = await service.store.list_sessions(10)
    assert (usage.session_key, usage.replica_id, usage.turns, usage.failed_turns) == ("a//s1", "r1", 1, 0)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (7, 4, 3)
    assert usage.ttft_turns == 0, "nobody sees a first token of a whole answer"
    assert usage.decode_s > 0
    assert "wisp_ingress_ttft_seconds_count" not in service.telemetry.scrape()
    assert 'wisp_ingress_turns_total{status="200",tenant="a"} 1.0' in service.telemetry.scrape()


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_a_stream_passes_in_pieces_and_shows_usage_only_if_asked(service: Service, wants_usage: bool) -> None:
    service.handle.scripts = [[HEAD, *EVENTS]]
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    reply = await service.chat(stream=True, **options)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (b'"usage"' in reply.body) == wants_usage
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.body.startswith(EVENTS[0])
    (record,) = await service.store.list_turns(10)
    assert record.completion_tokens == 3
    assert record.ttft_s is not None
    assert 'wisp_ingress_ttft_seconds_count{tenant="a"} 1.0' in service.telemetry.scrape()


async def test_the_engine_s_client_errors_come_in_openai_s_form(service: Service) -> None:
    message = "This model's maximum context length is 512 tokens."
    engine = {"error": {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
    for is_stream in (False, True):
        service.handle.scripts = [[{**HEAD, "status": 400}, json.dumps(engine).encode()]]
        reply = await service.chat(stream=is_stream)
        assert reply.status == 400
        assert reply.error == {
            "message": message,
            "type": "invalid_request_error",
            "param": "input_tokens",
            "code": "context_length_exceeded",
        }


async def test_the_engine_s_own_troubles_stay_inside(service: Service) -> None:
    service.handle.scripts = [[{**HEAD, "status": 500}, b'{"error": {"message": "Traceback /srv/secret"}}']]
    reply = await service.chat()
    assert reply.status == 500
    assert b"secret" not in reply.body
    service.handle.scripts = [[ValueError("a bug with /srv/secret")]]
    with pytest.raises(ValueError, match="a bug"):  # Starlette answers, then lets the server log it.
        await service.chat()


async def test_over_quota() -> None:
    service = Service(requests_per_minute=1)
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200
    reply = await service.chat()
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert 59 <= int(reply.headers["retry-after"]) <= 60
    assert len(service.handle.calls) == 1


@pytest.mark.parametrize("max_model_len", [512, None, -1])  # -1: vLLM's word for as many as fit
async def test_n_counts_against_the_tokens(max_model_len: int | None) -> None:
    service = Service(tokens_per_minute=500, max_model_len=max_model_len)
    reply = await service.chat(n=5, max_tokens=100)
    assert (reply.status, reply.error["type"]) == (429, "tokens")


async def test_a_turn_takes_a_place_for_each_of_its_answers() -> None:
    service = Service(max_concurrent_turns=4)
    reply = await service.chat(n=5, max_tokens=1)
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert "concurrent turns: limit 4, requested 5" in reply.error["message"]
    assert "retry-after" not in reply.headers, "waiting does not help"
    body = json.dumps({"model": "tiny", "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}).encode()
    reply = await service.request("/v1/completions", body, method="POST")
    assert "limit 4, requested 6" in reply.error["message"]
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat(n=4, max_tokens=1)).status == 200


async def test_wrong_keys_and_models(service: Service) -> None:
    for headers in ({}, {"authorization": "Bearer nope"}):
        reply = await service.request("/v1/chat/completions", b"{}", method="POST", headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    reply = await service.chat(model="gpt-9")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert (await service.request("/v1/models", headers={})).status == 401


async def test_models(service: Service) -> None:
    listed = json.loads((await service.request("/v1/models")).body)
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert json.loads((await service.request("/v1/models/tiny")).body)["object"] == "model"
    assert (await service.request("/v1/models/other")).error["code"] == "model_not_found"


async def test_a_large_body_is_refused_declared_or_not(service: Service) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-length": "10001"}
    reply = await service.request("/v1/completions", b"", method="POST", headers=headers)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    reply = await service.request("/v1/completions", [b"x" * 4000] * 50, method="POST")
    assert reply.status == 413


async def test_large_headers_are_refused(service: Service) -> None:
    reply = await service.request("/healthz", headers={"x-filler": "x" * 2000})
    assert (reply.status, reply.error["code"]) == (431, "headers_too_large")


async def test_unknown_urls_and_methods_answer_in_openai_s_form(service: Service) -> None:
    assert (await service.request("/v1/embeddings", method="POST")).error["type"] == "invalid_request_error"
    assert (await service.request("/v1/chat/completions")).status == 405
    for path in ("/docs", "/openapi.json", "/reset_prefix_cache", "/collective_rpc", "/sleep"):
        assert (await service.request(path, method="POST")).status == 404


async def test_readiness_tells_which_engine_is_dead(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SHARED_S", 0.0)
    good, bad = {"replica_id": "r1", "is_healthy": True}, {"replica_id": "r2", "is_healthy": False}
    for health, status in (([], 503), ([good], 503), ([good, bad], 503), ([good, {**good, "replica_id": "r2"}], 200)):
        service.handle.health = health
        reply = await service.request("/readyz", headers={})
        assert reply.status == status
        assert len(json.loads(reply.body)["replicas"]) == len(health)
    assert (await service.request("/healthz", headers={})).status == 200


async def test_a_replica_that_hangs_or_fails_hides_no_other(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas.broadcast, "__defaults__", (0.05,))
    good = {"replica_id": "r1", "is_healthy": True}
    service.handle.health = [None, good, RayActorError()]
    ready = await service.request("/readyz", headers={})
    assert (ready.status, json.loads(ready.body)["replicas"]) == (503, [good])
    page = "# TYPE wisp_x gauge\nwisp_x 1\n"
    monkeypatch.setattr(service.handle, "broadcast", lambda method_name: Broadcast([None, ("r2", page)]))
    text = (await service.request("/metrics", headers={})).body.decode()
    assert 'wisp_x{replica="r2"} 1.0' in text


async def test_all_who_ask_at_once_whether_it_is_ready_cost_one_question(service: Service) -> None:
    service.handle.health = [{"replica_id": name, "is_healthy": True} for name in ("r1", "r2")]
    ready = await asyncio.gather(*(service.request("/readyz", headers={}) for _ in range(50)))
    assert [reply.status for reply in ready] == [200] * 50
    assert service.handle.broadcasts == ["health"]


async def test_pages_are_merged_beside_the_event_loop(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def merge(pages: Any) -> str:
        threads.append(threading.current_thread())
        return "page"

    monkeypatch.setattr(cluster, "merge_expositions", merge)
    assert (await service.request("/metrics", headers={})).body == b"page"
    assert threads != [threading.main_thread()]


async def test_off_loopback_metrics_take_a_key_that_opens_nothing_else() -> None:
    service = Service(host="0.0.0.0")
    for key, status in (("", 401), (KEY, 401), (METRICS_KEY, 200), (ADMIN_KEY, 200)):
        assert (await service.request("/metrics", headers={"authorization": f"Bearer {key}"})).status == status
    for path in ("/wisp/status", "/wisp/tenants", "/wisp/recording", "/v1/models"):
        assert (await service.request(path, headers={"authorization": f"Bearer {METRICS_KEY}"})).status == 401


async def test_a_service_without_replicas_yet_is_not_ready(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(method_name: str) -> None:
        raise DeploymentUnavailableError(DeploymentID(name="Replica"))

    monkeypatch.setattr(service.handle, "broadcast", broadcast)
    assert (await service.request("/readyz", headers={})).status == 503


async def test_status_needs_the_admin_key(service: Service) -> None:
    for key in (KEY, "", "wrong"):
        assert (await service.request("/wisp/status", headers={"authorization": f"Bearer {key}"})).status == 401
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    await service.chat(headers={"x-session-id": "s1"})
    reply = await service.request("/wisp/status", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert json.loads(reply.body)["sessions"][0]["session_key"] == "a//s1"
    service.store.is_available = False
    assert (await service.request("/wisp/status", headers={"authorization": f"Bearer {ADMIN_KEY}"})).status == 503


async def test_metrics_show_every_process_once_per_family(service: Service) -> None:
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    await service.chat()
    text = (await service.request("/metrics", headers={})).body.decode()
    assert 'wisp_ingress_turns_total{replica="ingress",status="200",tenant="a"} 1.0' in text
    assert 'wisp_x{replica="r1"} 1.0' in text
    assert text.count("# TYPE wisp_x gauge") == 1


async def test_metrics_show_every_ingress(service: Service) -> None:
    pages = [(f"ingress-{name}", f"# TYPE wisp_y gauge\nwisp_y {value}\n") for name, value in (("a", 1), ("b", 2))]

    class Ingresses:
        def broadcast(self, method_name: str) -> Any:
            assert method_name == "scrape"
            return Broadcast(pages)

    text = await Cluster(
        service.store,
        [service.handle],
        lambda: service.handle,
        service.telemetry,
        num_replicas=2,
        stale_after_s=10,
        service_started_s=0.0,
        find_ingresses=Ingresses,  # type: ignore[arg-type]
    ).metrics()
    assert 'wisp_y{replica="ingress-a"} 1.0' in text
    assert 'wisp_y{replica="ingress-b"} 2.0' in text


async def test_status_shows_the_sessions_of_this_run_only() -> None:
    service = Service(started_s=time.time())
    await service.store.record_turn(TurnRecord(session_key="a//old", replica_id="r0", at_s=time.time() - 60))
    await service.store.record_turn(TurnRecord(session_key="a//new", replica_id="r1", at_s=time.time() + 1))
    rows = json.loads((await service.admin("/wisp/status")).body)["sessions"]
    assert [row["session_key"] for row in rows] == ["a//new"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions/"), ("GET", "/healthz/"), ("GET", "/metrics/")]
)
async def test_no_path_leads_to_a_host_that_the_client_names(service: Service, method: str, path: str) -> None:
    reply = await service.request(path, method=method, headers={"host": "evil.example"})
    assert (reply.status, reply.error["message"]) == (404, f"Invalid URL ({method} {path})")
    assert "location" not in reply.headers
