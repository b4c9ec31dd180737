"""What a router expects of a turn from the signatures that it has read, and how often it reads them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from services.ingress import working_sets
from services.ingress.placement import Turn
from services.ingress.working_sets import WorkingSets
from wisp_core.contracts import Signature
from wisp_core.store.memory_store import MemoryStore
from wisp_core.working_set.signature import pack

LAYERS, EXPERTS, TOP_K = 2, 4, 1
KEYS = ["t", "t/@p", "t/u", "t/u/s"]


def signature(key: str, expert: int, tokens: int = 0, prefill: int | None = None) -> Signature:
    counts, prompts = np.zeros((LAYERS, EXPERTS)), np.zeros((LAYERS, EXPERTS))
    counts[:, expert] = 1 if tokens else 0
    prompts[:, prefill or 0] = 1
    return Signature(
        key=key,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        weights=pack(counts),
        decode_tokens=tokens,
        lookups=tokens * LAYERS,
        prefill_weights=b"" if prefill is None else pack(prompts),
        prefill_tokens=0 if prefill is None else 1000,
    )


class CountingStore(MemoryStore):
    """Counts reads of signatures."""

    reads = 0

    async def read_signatures(self, keys: Iterable[str]) -> dict[str, Signature]:
        self.reads += 1
        return await super().read_signatures(keys)


async def expected(*signatures: Signature, keys: list[str] | None = None) -> np.ndarray | None:
    store = MemoryStore()
    await store.write_signatures("r1", signatures)
    found = await WorkingSets(store).expect(KEYS if keys is None else keys, TOP_K)
    return None if found is None else found.rates[0]


def test_a_turn_is_known_by_its_tenant_prompt_user_and_session() -> None:
    turn = Turn(session_key="t/u/s", user_key="t/u", prompt_key="t/@p", tenant="t")
    assert turn.signature_keys() == KEYS
    assert Turn(session_key="t", tenant="t").signature_keys() == ["t"]
    assert Turn().signature_keys() == []


async def test_nothing_known_is_nothing_expected() -> None:
    assert await expected() is None
    assert await expected(keys=[]) is None
    assert await expected(signature("t/u/s", 0)) is None, "it has neither decoded nor prefilled"


async def test_the_more_particular_counts_more() -> None:
    found = await expected(signature("t", 0, 1000), signature("t/@p", 1, 1000), signature("t/u", 2, 1000))
    assert found is not None
    assert found.argmax() == 2
    assert found.sum() == pytest.approx(1.0, abs=1e-3)
    assert found[0] < found[1] < 0.05


async def test_a_prompt_tells_of_its_own_session_until_that_has_decoded() -> None:
    found = await expected(signature("t/u", 2, 1000, prefill=3), signature("t/u/s", 1, 0, prefill=0))
    assert found is not None
    # The prompt weighs 64 tokens against the 32 of all that is known of others; the user's own prompts do not count.
    assert found == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=1e-3)
    found = await expected(signature("t/u", 2, 1000), signature("t/u/s", 1, 3200, prefill=0))
    assert found is not None
    assert found[1] > 0.98


async def test_signatures_are_read_again_only_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    await store.write_signatures("r1", [signature("t", 0, 10)])
    known = WorkingSets(store)
    for _ in range(10):
        assert await known.expect(KEYS, TOP_K) is not None
    assert store.reads == 1
    monkeypatch.setattr(working_sets, "MAX_AGE_S", -1.0)
    await known.expect(KEYS, TOP_K)
    assert store.reads == 2


async def test_without_the_store_what_is_known_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_sets, "MAX_AGE_S", -1.0)
    store = MemoryStore()
    await store.write_signatures("r1", [signature("t", 3, 10)])
    known = WorkingSets(store)
    await known.expect(KEYS, TOP_K)
    store.is_available = False
    found = await known.expect(KEYS, TOP_K)
    assert found is not None
    assert found.rates[0].argmax() == 3


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_sets, "MAX_KEYS", 5)
    known = WorkingSets(MemoryStore())
    for number in range(20):
        await known.expect([f"s{number}"], TOP_K)
    assert list(known._known) == [f"s{number}" for number in range(15, 20)]
