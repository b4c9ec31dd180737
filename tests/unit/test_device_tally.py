"""Signatures from what a device has counted: who owns which row, and what becomes of the counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wisp_core.engine import device_tally
from wisp_core.engine.device_tally import DeviceSessionTally, RequestKeys, first_row_keys
from wisp_core.engine.session_tally import EVERYONE
from wisp_core.working_set.signature import ExpertTally, unpack

LAYERS, E, K = 2, 8, 2


@dataclass
class Uses:
    counts: np.ndarray
    hits: int


@dataclass
class HostCounter:
    """Counts on the host what the next step's ids are said to be."""

    ids: list[list[list[int]]] = field(default_factory=list)  # [layers][rows][K] of the next step
    found: dict[str, Uses] = field(default_factory=dict)

    def count(self, keys: Sequence[str | None]) -> None:
        for layer, rows in enumerate(self.ids):
            for key, row in zip(keys, rows, strict=False):
                if key is not None:
                    uses = self.found.setdefault(key, Uses(np.zeros((LAYERS, E), np.int32), 0))
                    uses.counts[layer, row] += 1
                    uses.hits += len(row)

    def reset(self) -> None:
        self.found = {}

    def drain(self) -> Mapping[str, Uses]:
        found, self.found = self.found, {}
        return found


def request(request_id: str, session: str | None) -> Any:
    extra_args = None if session is None else {"wisp_session": session}
    return SimpleNamespace(req_id=request_id, sampling_params=SimpleNamespace(extra_args=extra_args))


def output(new: Sequence[Any] = (), finished: Sequence[str] = (), num_tokens: int = 0) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=list(new), finished_req_ids=set(finished), total_num_scheduled_tokens=num_tokens
    )


def batch(*requests: tuple[str, int, bool]) -> Any:
    ids, counts, prefilling = zip(*requests, strict=True)
    return SimpleNamespace(
        req_ids=list(ids), num_scheduled_tokens=np.array(counts), is_prefilling_np=np.array(prefilling)
    )


def test_requests_are_known_from_their_first_step_to_their_end() -> None:
    keys = RequestKeys()
    keys.update(output([request("a", "t/u/s"), request("b", None)]))
    assert (keys.of("a"), keys.of("b"), keys.of("c")) == ("t/u/s", "", "")
    keys.update(output(finished=["a"]))
    assert keys.of("a") == ""


def test_only_rows_that_decode_have_an_owner() -> None:
    step = batch(("a", 1, False), ("b", 1, True), ("c", 1, False), ("d", 7, True))
    assert first_row_keys(step, str.upper) == ["A", None, "C"]
    assert first_row_keys(batch(("d", 7, True)), str.upper) == []


def test_a_session_counts_for_its_user_its_tenant_and_everyone() -> None:
    counter = HostCounter()
    tally = DeviceSessionTally(counter, num_layers=LAYERS, num_experts=E, top_k=K)
    tally.begin_step(output([request("a", "t/u/s"), request("b", "t/v/r")]))
    counter.ids = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    for _ in range(3):
        tally.end_step(batch(("a", 1, False), ("b", 1, False)))
    tally.end_step(None)
    found = {signature.key: signature for signature in tally.export_touched()}
    assert set(found) == {EVERYONE, "t", "t/u", "t/u/s", "t/v", "t/v/r"}
    assert found["t/u/s"].decode_tokens == 3
    assert found["t"].decode_tokens == found[EVERYONE].decode_tokens == 6
    assert found["t/u/s"].lookups == found["t/u/s"].hits == 3 * LAYERS * K
    weights = unpack(found["t/u/s"])
    assert np.nonzero(weights[0])[0].tolist() == [0, 1]
    assert np.nonzero(weights[1])[0].tolist() == [4, 5]
    assert tally.export_touched() == []


def test_a_runner_that_shows_no_batch_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(device_tally.logger, "warning", told.append)
    tally = DeviceSessionTally(HostCounter(), num_layers=LAYERS, num_experts=E, top_k=K)
    tally.begin_step(output())
    tally.end_step(None)
    assert told == [], "an empty step launches nothing"
    for _ in range(3):
        tally.begin_step(output(num_tokens=5))
        tally.end_step(None)
    assert len(told) == 1
    assert "VLLM_USE_V2_MODEL_RUNNER" in told[0]


def test_what_came_before_a_reset_is_forgotten() -> None:
    counter = HostCounter()
    tally = DeviceSessionTally(counter, num_layers=LAYERS, num_experts=E, top_k=K)
    counter.ids = [[[0, 1]], [[4, 5]]]
    tally.end_step(batch(("warm-up", 1, False)))
    tally.export_touched()
    tally.end_step(batch(("warm-up", 1, False)))
    tally.reset()
    assert tally.export_touched() == []
    tally.end_step(batch(("a", 1, False)))
    assert [signature.decode_tokens for signature in tally.export_touched()] == [1]


def test_counts_added_at_once_weigh_as_those_added_row_by_row() -> None:
    at_once, one_by_one = (ExpertTally(1, E, half_life_tokens=4.0, max_keys=4) for _ in range(2))
    ids = np.array([[1, 2], [1, 3]])
    for _ in range(5):
        for row in ids:
            one_by_one.add_counts("k", np.bincount(row, minlength=E)[None], num_rows=1, hits=0)
        at_once.add_counts("k", np.bincount(ids.reshape(-1), minlength=E)[None], num_rows=2, hits=0)
    a, b = at_once.signature("k"), one_by_one.signature("k")
    assert a is not None
    assert b is not None
    assert (a.decode_tokens, a.lookups) == (b.decode_tokens, b.lookups)
    assert np.abs(unpack(a) - unpack(b)).max() < 0.15  # uses within one report all weigh alike
