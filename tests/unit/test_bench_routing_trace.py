"""The replayed routing has the statistics that it promises, and follows sessions."""

import numpy as np
import numpy.typing as npt
import pytest

from loadtests.routing_trace import REPEAT, TraceConfig, routing_trace

CONFIG = TraceConfig(sessions=4, positions=200, layers=6, experts=64, top_k=8)


@pytest.fixture(scope="module")
def trace() -> npt.NDArray[np.int16]:
    return routing_trace(CONFIG)


def test_tokens_use_distinct_experts_of_the_model(trace: npt.NDArray[np.int16]) -> None:
    assert trace.shape == (6, 4, 200, 8)
    ordered = np.sort(trace, axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all()
    assert ordered.min() >= 0
    assert ordered.max() < 64


def test_at_least_the_promised_share_repeats(trace: npt.NDArray[np.int16]) -> None:
    now, before = trace[:, :, 1:, :, None], trace[:, :, :-1, None, :]
    repeats = (now == before).any(axis=-1).mean()
    # Experts that are drawn anew may be the same ones: popular ones often are.
    assert REPEAT < repeats < REPEAT + 0.25


def test_some_experts_are_far_more_popular(trace: npt.NDArray[np.int16]) -> None:
    uses = np.sort(np.bincount(trace[0].ravel(), minlength=64))[::-1]
    assert uses[:16].sum() > 0.45 * uses.sum()
    assert uses[-16:].sum() < 0.15 * uses.sum()


def test_sessions_share_some_experts_and_not_all(trace: npt.NDArray[np.int16]) -> None:
    uses = np.stack([np.bincount(trace[0, session].ravel(), minlength=64) for session in range(4)]).astype(float)
    correlation = np.corrcoef(uses)[np.triu_indices(4, 1)]
    assert 0.1 < correlation.mean() < 0.9


def test_equal_configs_give_equal_traces_and_other_seeds_others(trace: npt.NDArray[np.int16]) -> None:
    assert (routing_trace(CONFIG) == trace).all()
    other = TraceConfig(sessions=4, positions=200, layers=6, experts=64, top_k=8, seed=1)
    assert (routing_trace(other) != trace).any()


def test_every_expert_of_a_small_layer_can_be_needed() -> None:
    trace = routing_trace(TraceConfig(sessions=1, positions=3, layers=1, experts=4, top_k=4))
    assert (np.sort(trace, axis=-1) == np.arange(4)).all()
