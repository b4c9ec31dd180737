"""Signatures: packing, merging and tallies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wisp_core.contracts import Signature
from wisp_core.working_set.signature import ExpertTally, merge, pack, unpack


def signature(counts: np.ndarray) -> Signature:
    return Signature(key="t/u/s", num_layers=counts.shape[0], num_experts=counts.shape[1], weights=pack(counts))


@given(hnp.arrays(np.float64, (3, 5), elements=st.floats(0, 1e6)))
def test_round_trip_keeps_relative_use_to_one_part_in_255(counts: np.ndarray) -> None:
    again = Signature.model_validate_json(signature(counts).model_dump_json())
    largest = counts.max(axis=1, keepdims=True)
    expected = np.divide(counts, largest, out=np.zeros_like(counts), where=largest > 0)
    np.testing.assert_allclose(unpack(again), expected, atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize("weights", [b"not zlib", pack(np.ones((2, 4))), pack(np.ones((4, 4)))])
def test_bytes_that_do_not_fit_are_refused(weights: bytes) -> None:
    broken = Signature(key="k", num_layers=3, num_experts=4, weights=weights)
    with pytest.raises(ValueError, match="signature 'k'"):
        unpack(broken)


def test_tally_counts_uses_and_decode_hits_by_key() -> None:
    tally = ExpertTally(num_layers=2, num_experts=4, half_life_tokens=1e9, max_keys=8)
    tally.add_counts("a", np.array([[2, 1, 1, 0]] * 2), num_rows=2, hits=4)
    for layer in range(2):
        tally.add_prefill("b", layer, np.array([[3, 2]]))
    a, b = tally.signature("a"), tally.signature("b")
    assert a is not None
    assert b is not None
    np.testing.assert_allclose(unpack(a), [[1, 0.5, 0.5, 0]] * 2, atol=0.01)
    assert (a.decode_tokens, a.lookups, a.hits) == (2, 8, 4)
    assert (b.decode_tokens, b.lookups, b.hits) == (0, 0, 0)
    assert not unpack(b).any(), "prefills are counted apart"
    np.testing.assert_allclose(unpack(b, is_prefill=True), [[0, 0, 1, 1]] * 2, atol=0.01)
    assert (a.prefill_tokens, b.prefill_tokens) == (0, 1)
    assert not unpack(a, is_prefill=True).any()
    assert tally.signature("c") is None


def test_tally_halves_after_its_half_life_and_drops_the_stalest_key() -> None:
    tally = ExpertTally(num_layers=1, num_experts=3, half_life_tokens=2, max_keys=2)
    tally.add_counts("a", np.array([[1, 0, 0]]), num_rows=1, hits=0)
    tally.add_counts("a", np.array([[0, 2, 0]]), num_rows=2, hits=0)
    found = tally.signature("a")
    assert found is not None
    np.testing.assert_allclose(unpack(found), [[0.25, 1, 0]], atol=0.01)
    for key in ("b", "a", "c"):
        tally.add_counts(key, np.array([[0, 0, 1]]), num_rows=1, hits=0)
    assert tally.keys() == ("a", "c")


def test_merged_signatures_weigh_by_their_tokens_prefills_apart() -> None:
    one = signature(np.array([[1.0, 0.0, 0.0]])).model_copy(
        update={"decode_tokens": 30, "prefill_tokens": 10, "prefill_weights": pack(np.array([[0.0, 0.0, 1.0]]))}
    )
    other = signature(np.array([[0.0, 1.0, 0.0]])).model_copy(update={"decode_tokens": 10})
    merged = merge("t/u", [one, other])
    assert (merged.decode_tokens, merged.prefill_tokens) == (40, 10)
    np.testing.assert_allclose(unpack(merged), [[1, 1 / 3, 0]], atol=0.01)
    np.testing.assert_allclose(unpack(merged, is_prefill=True), [[0, 0, 1]], atol=0.01)
    assert merge("t/u", [other]).prefill_weights == b""
    with pytest.raises(ValueError, match="shapes"):
        merge("t/u", [one, signature(np.ones((2, 3)))])
