"""Recordings of a live service: what the ingress gives, what becomes of it, and what a file keeps."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from ingress_in_process import ADMIN_KEY, ANSWER, HEAD, Service
from policy_snapshots import make_snapshot

from wisp_core.contracts import PagerCounts, Signature
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.recording import Recording, measured_curves, read_recording, recording_of, write_recording
from wisp_core.simulator.trace_files import read_trace
from wisp_core.tenant_contracts import TurnRecord
from wisp_core.working_set.signature import pack


def turn(session: str, at_s: float, prompt: int, output: int = 10, **changes: object) -> TurnRecord:
    fields: dict[str, object] = {
        "session_key": session,
        "replica_id": "r1",
        "at_s": at_s,
        "duration_s": 2.0,
        "ttft_s": 0.5,
        "prompt_tokens": prompt,
        "completion_tokens": output,
    }
    return TurnRecord.model_validate(fields | changes)


def signature(key: str, uses: tuple[int, int], tokens: int = 10) -> Signature:
    """Of somebody who uses the first two of eight experts so often, in both layers."""
    counts = np.zeros((2, 8))
    counts[:, :2] = uses
    return Signature(
        key=key, num_layers=2, num_experts=8, weights=pack(counts), decode_tokens=tokens, lookups=2 * 2 * tokens
    )


def test_topics_use_what_their_sessions_do() -> None:
    records = [
        turn("a/ann/s1", 10.0, 9),
        turn("a/ann/s2", 20.0, 9),
        turn("a/bob/s3", 30.0, 9),
        turn("b/cy/s4", 40.0, 9),
    ]
    seen = [signature("a/ann/s1", (9, 0)), signature("a/ann/s2", (0, 9), tokens=30), signature("a/bob/s3", (9, 0))]
    recording = recording_of(records, "test", snapshots=[make_snapshot()], signatures=seen)
    rates = recording.topic_rates()
    assert rates is not None
    assert rates.shape == (3, 2, 8)
    assert rates[0, 1, :3] == pytest.approx([0.5, 1.0, 0.0], abs=0.01), "as their tokens weigh, no expert twice a token"
    assert rates[1, 0, :3] == pytest.approx([1.0, 0.0, 0.0])
    assert rates[2] == pytest.approx((rates[0] + rates[1]) / 2), "nobody has seen this one: taken to be like all"
    assert dataclasses.replace(recording, signatures=()).topic_rates() is None


def test_turns_become_clients_with_their_pauses_and_prefixes() -> None:
    records = [
        turn("acme/ann/s1", 112.0, 150, cached_tokens=96),
        turn("acme/ann/s1", 102.0, 100),
        turn("globex//s2", 105.0, 70),
        turn("acme/ann/s1", 120.0, 40),
        turn("acme/ann/s1", 121.0, 40, is_failed=True),
        turn("acme/bob/s3", 122.0, 0),
    ]
    trace = recording_of(records, "test").trace
    rows = list(trace)
    assert trace.tenants == ("acme", "globex")
    assert [(r.client, r.at_s, r.think_s, r.prompt_tokens, r.prefix_tokens) for r in rows] == [
        (0, 0.0, 0.0, 100, 0),
        (0, 0.0, 8.0, 150, 110),
        (0, 0.0, 6.0, 40, 0),  # a new conversation: it is shorter than what was there
        (1, 3.0, 0.0, 70, 0),
    ]
    assert trace.has_measurements
    assert rows[0].ttft_s == 0.5
    with pytest.raises(ConfigurationError, match="no turn"):
        recording_of([turn("a/b/c", 1.0, 0)], "empty")


def test_a_file_keeps_trace_and_snapshots(tmp_path: Path) -> None:
    snapshot = make_snapshot()
    seen = [signature("acme/ann/s1", (9, 0)), signature("acme/ann", (9, 0)), signature("globex/bob/s2", (0, 9))]
    records = [turn("acme/ann/s1", 102.0, 100), turn("globex/bob/s2", 103.0, 50)]
    recording = recording_of(records, "test", snapshots=[snapshot], signatures=seen)
    path = tmp_path / "recording.jsonl"
    write_recording(path, recording)
    again = read_recording(path)
    assert (again.snapshots, again.started_at_s) == ((snapshot,), 100.0)
    assert [one.key for one in again.signatures] == ["0", "1"], "sessions by number, nobody else"
    assert again.trace.turns["duration_s"].tolist() == [2.0, 2.0]
    assert len(read_trace(path)) == 2
    assert again.matches(2, 8, 2)
    assert not again.matches(2, 8, 4)
    path.write_text(path.read_text() + '{"snapshot": {"replica_id": 3}}\n')
    with pytest.raises(ConfigurationError, match="line 8"):
        read_recording(path)


def test_curves_belong_to_the_batch_between_two_snapshots() -> None:
    def at(steps: int, tokens: int, distinct: int, misses: float) -> object:
        counts = PagerCounts(steps=steps, tokens=tokens, distinct=distinct)
        return make_snapshot(decode=counts, decode_misses_by_cap=tuple(misses * (8 - cap) for cap in range(9)))

    trace = recording_of([turn("a/b/c", 102.0, 100)], "test").trace
    # 100 steps of 1 row, then 100 of 4; an idle snapshot in between says nothing.
    seen = (at(100, 100, 400, 1.0), at(100, 100, 400, 9.0), at(200, 500, 1600, 3.0))
    curves = Recording(trace=trace, snapshots=seen).expert_curves()  # type: ignore[arg-type]
    assert curves.by_cap(1, 1)[2] == 6.0
    assert curves.by_cap(4, 4)[2] == 18.0
    assert curves.by_cap(2, 1)[2] == pytest.approx(6.0 + 12.0 / 3)
    assert [curves.distinct_experts(batch, 1) for batch in (1, 4)] == [4.0, 12.0]
    with pytest.raises(ConfigurationError, match="no decode step"):
        Recording(trace=trace).expert_curves()


def test_a_few_steps_of_another_batch_bend_no_curve() -> None:
    batches, misses, steps = [2.0, 4.0, 6.0, 5.0], [4.0, 8.0, 12.0, 40.0], [1000, 1000, 1000, 1]
    snapshots, total, tokens = [], 0, 0
    for batch, missed, more in zip(batches, misses, steps, strict=True):
        total, tokens = total + more, tokens + round(batch * more)
        counts = PagerCounts(steps=total, tokens=tokens, distinct=total)
        snapshots.append(make_snapshot(decode=counts, decode_misses_by_cap=(missed,) * 9))
    curves = measured_curves(snapshots)
    assert [curves.by_cap(batch, 1)[3] for batch in (2, 5, 6)] == pytest.approx([4.0, 10.0, 12.0], rel=0.01)


async def test_the_ingress_shows_turns_in_numbers_to_the_operator_only() -> None:
    service = Service()
    await service.tenants.refresh()
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat()).status == 200
    await service.store.write_snapshot(make_snapshot())
    assert (await service.request("/wisp/recording?turns=5", headers={})).status == 401
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    reply = await service.request("/wisp/recording?turns=5", headers=admin)
    shown = json.loads(reply.body)
    assert [one["prompt_tokens"] for one in shown["turns"]] == [ANSWER["usage"]["prompt_tokens"]]
    assert len(shown["snapshots"][0]["decode_misses_by_cap"]) == 9
    assert "content" not in reply.body.decode()
    assert json.loads((await service.request("/wisp/recording", headers=admin)).body)["turns"] == []
    assert (await service.request("/wisp/recording?turns=-1", headers=admin)).status == 400


def test_a_trace_without_measurements_says_so() -> None:
    trace = recording_of([turn("a/b/c", 102.0, 100, ttft_s=None)], "test").trace
    assert math.isnan(next(iter(trace)).ttft_s)
    assert np.isnan(trace.turns["ttft_s"]).all()
