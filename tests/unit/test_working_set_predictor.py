"""What is expected of a working set before much of it was seen, and how many slots it is said to need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loadtests.routing_trace import TraceConfig, routing_trace
from wisp_core.pager.slot_table import SlotTable
from wisp_core.working_set.predictor import (
    LRU_MARGIN,
    PRIOR_TOKENS,
    Evidence,
    miss_share_by_cap,
    predict,
    prefill_worth,
    safe_cap,
)

LAYERS, EXPERTS, TOP_K = 3, 64, 4
usages = hnp.arrays(np.float64, (LAYERS, 8), elements=st.floats(0, 100))


def rates_of(trace: np.ndarray) -> np.ndarray:
    """Uses per token ``[L, E]`` of the ids ``[L, T, k]``."""
    return np.stack([np.bincount(layer.reshape(-1), minlength=EXPERTS) / trace.shape[1] for layer in trace]).astype(
        np.float32
    )


def test_without_evidence_nothing_is_expected() -> None:
    assert predict([]) is None


def test_a_session_s_own_tokens_take_over_from_what_others_do() -> None:
    others, own = np.zeros((1, 2), dtype=np.float32), np.ones((1, 2), dtype=np.float32)
    for tokens, share in ((0, 0.0), (PRIOR_TOKENS, 0.5), (99 * PRIOR_TOKENS, 0.99)):
        expected = predict([Evidence(others, 1000), Evidence(own, tokens)])
        assert expected == pytest.approx(np.full((1, 2), share))


def test_evidence_of_another_model_is_left_behind() -> None:
    expected = predict([Evidence(np.ones((4, 4), dtype=np.float32), 9), Evidence(np.ones((1, 2), dtype=np.float32), 1)])
    assert expected is not None
    assert expected.shape == (1, 2)


def test_a_long_prompt_weighs_no_more_than_some_answers() -> None:
    assert prefill_worth(8) == 2
    assert prefill_worth(100_000) == prefill_worth(1000) == 64


@given(usages, st.floats(0, 1))
def test_the_safe_size_is_the_smallest_that_keeps_the_target(usage: np.ndarray, target: float) -> None:
    shares = miss_share_by_cap(usage)
    assert (np.diff(shares) <= 1e-9).all()
    assert shares[-1] == pytest.approx(0.0, abs=1e-9)
    cap = safe_cap(usage, target, min_cap=0)
    assert LRU_MARGIN * shares[cap] <= target + 1e-8
    assert cap == 0 or LRU_MARGIN * shares[cap - 1] > target


def test_a_safe_size_in_numbers() -> None:
    usage = np.array([[70, 20, 10, 0], [0, 10, 20, 70]])
    assert miss_share_by_cap(usage) == pytest.approx([1.0, 0.3, 0.1, 0.0, 0.0])
    assert [safe_cap(usage, target) for target in (0.5, 0.3, 0.15, 0.0)] == [1, 2, 2, 3]
    assert safe_cap(np.zeros((2, 4)), 0.1, min_cap=2) == 2


@pytest.mark.parametrize("target", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_the_safe_size_holds_under_lru(target: float, seed: int) -> None:
    """Replayed one token at a time by the pager's own table, misses stay below the target at the predicted cap."""
    trace = routing_trace(TraceConfig(sessions=1, positions=900, layers=1, experts=EXPERTS, top_k=TOP_K, seed=seed))[
        0, 0
    ]
    cap = safe_cap(rates_of(trace[None, :450]), target)
    table = SlotTable(EXPERTS, cap)
    copies = [sum(len(batch.copies) for batch in table.plan(row[None])) for row in trace]
    missed = np.mean(copies[450:]) / TOP_K
    assert target / 3 <= missed <= target, cap


def distance(expected: np.ndarray, seen: np.ndarray) -> float:
    """Part of the uses that were expected elsewhere, from 0 to 1."""
    return float(np.abs(expected - seen).sum() / 2 / (LAYERS * TOP_K))


def test_a_new_session_is_predicted_from_those_with_its_prompt_and_then_from_its_prefill() -> None:
    """The error of each stage, over 8 prompts whose sessions like the same experts: it shrinks with each."""
    errors: dict[str, list[float]] = {"nothing": [], "tenant": [], "prompt": [], "prefill": [], "answer": []}
    # Sessions with one prompt like the same experts; a trace stands for several of them, one after the other.
    groups = [
        routing_trace(TraceConfig(sessions=1, positions=1024, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=seed))
        for seed in range(8)
    ]
    answers = [rates_of(group[:, 0, 512:]) for group in groups]
    tenant = np.mean([rates_of(group[:, 0, :256]) for group in groups], axis=0)
    for number, group in enumerate(groups):
        stages = [Evidence(tenant, 2000.0)]
        errors["nothing"].append(distance(np.full((LAYERS, EXPERTS), TOP_K / EXPERTS), answers[number]))
        for name, ids, worth in (
            ("tenant", None, 0.0),
            ("prompt", group[:, 0, :256], 256.0),
            ("prefill", group[:, 0, 256:320], prefill_worth(64)),
            ("answer", group[:, 0, 320:384], 64.0),
        ):
            stages += [] if ids is None else [Evidence(rates_of(ids), worth)]
            expected = predict(stages)
            assert expected is not None
            errors[name].append(distance(expected, answers[number]))
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    assert means["tenant"] < means["nothing"]
    assert means["prompt"] < 0.5 * means["tenant"]
    assert means["prefill"] < means["prompt"] * 1.05
    assert means["answer"] < 0.25, means
