"""Which session used which experts, on a real engine whose batch changes while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, prompt, sampling

from wisp_core.contracts import Signature
from wisp_core.engine.offline import OfflineEngine
from wisp_core.engine.session_tally import SessionTally, prefixes
from wisp_core.engine.step_rows import DecodeRow, PrefillRows
from wisp_core.settings import WispSettings
from wisp_core.tiny_model.tiny import TinyModelConfig
from wisp_core.tiny_model.tiny_tokenizer import first_word_id
from wisp_core.working_set.signature import UseRates, unpack, use_rates

TINY = TinyModelConfig()

LENGTHS = [3, 30, 12, 21, 5, 17]
SESSIONS = [f"acme/u{number % 2}/s{number}" for number in range(6)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[OfflineEngine]:
    settings = WispSettings(vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES, bypass_if_it_fits=False)
    engine = OfflineEngine(str(tiny_model), {**ENGINE_ARGS, "max_num_seqs": 3}, settings)
    yield engine
    engine.shutdown()


def run(engine: OfflineEngine, numbers: list[int]) -> dict[str, Signature]:
    engine.generate(
        [prompt(number, 40 + number) for number in numbers],
        [sampling(number, LENGTHS[number], SESSIONS[number]) for number in numbers],
    )
    return {signature.key: signature for signature in engine.signatures()}


def test_rows_are_counted_for_the_session_that_owns_them(engine: OfflineEngine) -> None:
    # Three run at once; each that ends leaves its place in the batch to the next one.
    together = run(engine, list(range(6)))
    # The first token of a turn comes out of its prefill.
    assert {key: together[key].decode_tokens for key in SESSIONS} == {
        key: length - 1 for key, length in zip(SESSIONS, LENGTHS, strict=True)
    }
    assert {key: together[key].prefill_tokens for key in SESSIONS} == {
        key: 40 + number for number, key in enumerate(SESSIONS)
    }
    assert together["acme"].prefill_tokens == 0
    for number, key in enumerate(SESSIONS):
        before = together[key]
        alone = run(engine, [number])[key]
        assert alone.decode_tokens == 2 * before.decode_tokens
        # One block of the prompt is in the prefix cache now: what is not computed is not counted.
        assert alone.prefill_tokens - before.prefill_tokens == before.prefill_tokens - ENGINE_ARGS["block_size"]
        assert alone.lookups == 2 * before.lookups
        # The same tokens use the same experts again.
        assert used(alone) == used(before)


def used(signature: Signature) -> set[int]:
    return set(np.flatnonzero(unpack(signature) > 0).tolist())


def test_users_tenants_and_the_engine_have_tallies_of_their_own(engine: OfflineEngine) -> None:
    before = {signature.key: signature for signature in engine.signatures()}
    assert before == {}
    found = run(engine, [0, 1, 2])
    assert set(found) == {"", "acme", "acme/u0", "acme/u1", *SESSIONS[:3]}
    assert found[""].decode_tokens == found["acme"].decode_tokens
    assert found["acme/u0"].hits <= found["acme/u0"].lookups
    assert used(found["acme/u0"]) >= used(found[SESSIONS[0]])


def test_only_touched_keys_are_exported(engine: OfflineEngine) -> None:
    run(engine, [0])
    assert set(run(engine, [1])) == {"", "acme", "acme/u1", SESSIONS[1]}
    assert engine.signatures() == []


def test_a_prompt_tells_of_the_answer_to_come(engine: OfflineEngine) -> None:
    """Topics are planted in this model: what a new session's prompt uses is close to what its answer will use."""
    words = [first_word_id() + topic * TINY.words_per_topic for topic in (0, 1, 2)]
    prompts = [{"prompt_token_ids": list(range(first, first + 32))} for first in words]
    keys = [f"topics/u/{topic}" for topic in (0, 1, 2)]
    engine.generate(prompts, [sampling(1, 48, key) for key in keys])
    found = {signature.key: signature for signature in engine.signatures()}
    answers = [use_rates(found[key], top_k=TINY.top_k) for key in keys]
    for number, key in enumerate(keys):
        prefill = use_rates(found[key], top_k=TINY.top_k, is_prefill=True)
        own, *others = (overlap(prefill, answers[(number + i) % 3]) for i in range(3))
        assert own > 0.5
        assert own > 1.3 * max(others)


def overlap(a: UseRates, b: UseRates) -> float:
    """Shared use: per layer Σ min / Σ max of the shares (Ruzicka), averaged; 0 to 1."""
    shares = [rates / rates.sum(axis=1, keepdims=True) for rates in (a, b)]
    return float((np.minimum(*shares).sum(axis=1) / np.maximum(*shares).sum(axis=1)).mean())


def test_prefixes_of_a_session_key() -> None:
    assert list(prefixes("t/u/s")) == ["", "t", "t/u", "t/u/s"]
    assert list(prefixes("t/u/s/1")) == ["", "t", "t/u", "t/u/s/1"]
    assert list(prefixes("")) == [""]


class Rows:
    """Rows whose owner is given."""

    def __init__(self, owners: dict[int, str]) -> None:
        self._owners = owners

    def request_ids(self) -> list[str]:
        return list(self._owners.values())

    def decode_rows(self) -> list[DecodeRow]:
        return [DecodeRow(row, key) for row, key in self._owners.items()]

    def prefill_rows(self) -> list[PrefillRows]:
        return []


def test_hits_are_lookups_that_were_resident_before_the_step() -> None:
    tally = SessionTally(num_layers=1, num_experts=4)
    tally.begin_step(Rows({1: "t"}))  # type: ignore[arg-type]
    tally.observe(0, np.array([[0, 1], [1, 2]]), np.array([True, True, False, False]), is_prefill=True)
    tally.end_step()
    (_, tenant) = tally.export_touched()
    assert (tenant.decode_tokens, tenant.lookups, tenant.hits) == (1, 2, 1)


def test_forwards_outside_a_step_are_not_counted() -> None:
    tally = SessionTally(num_layers=1, num_experts=4)
    tally.observe(0, np.array([[0, 1]]), np.ones(4, dtype=bool), is_prefill=False)
    assert tally.export_touched() == []


def test_memory_is_bounded() -> None:
    tally = SessionTally(num_layers=1, num_experts=4, max_keys=5)
    for number in range(20):
        tally.begin_step(Rows({0: f"t/u/{number}"}))  # type: ignore[arg-type]
        tally.observe(0, np.array([[0, 1]]), np.ones(4, dtype=bool), is_prefill=False)
        tally.end_step()
    assert len(tally) == 5
    assert [signature.key for signature in tally.export_touched()][-1] == "t/u/19"
