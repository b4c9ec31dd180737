"""How many replicas: by turns, by time spent on copies, and never down to where it would go up again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import make_snapshot

from services.replica.autoscaling import (
    COPY_SHARE,
    TURNS,
    ReplicaWork,
    WorkingSetAutoscaling,
    desired_replicas,
    work_of,
)

LIMITS = {"target_turns": 8.0, "max_copy_share": 0.5}


@pytest.mark.parametrize(
    ("work", "current", "queued", "expected"),
    [
        ([], 2, 50.0, 2),  # nobody has reported
        ([(2, 0.1)], 1, 0.0, 1),
        ([(8, 0.1), (8, 0.1)], 2, 0.0, 2),
        ([(8, 0.1), (8, 0.1)], 2, 1.0, 3),
        ([(8, 0.1)], 1, 30.0, 5),
        ([(3, 0.6)], 1, 0.0, 2),  # thrashes, and has turns to give away
        ([(8, 0.9)], 2, 0.0, 2),  # what the second one brings is not known yet
        ([(4, 0.6), (4, 0.6)], 2, 0.0, 3),  # it did not bring enough
        ([(1, 0.9)], 1, 0.0, 1),  # another replica would not help its only turn
        ([(3, 0.1), (3, 0.1)], 2, 0.0, 1),
        ([(3, 0.3), (3, 0.3)], 2, 0.0, 2),  # one alone would thrash
        ([(3.5, 0.1), (3.5, 0.1)], 2, 0.0, 2),  # one alone would be full
        ([(0, 0.0)] * 4, 4, 0.0, 3),  # one at a time
    ],
)
def test_replicas_follow_turns_and_copies(
    work: list[tuple[float, float]], current: int, queued: float, expected: int
) -> None:
    assert desired_replicas([ReplicaWork(*one) for one in work], current, queued, **LIMITS) == expected


works = st.lists(st.builds(ReplicaWork, st.floats(0, 50), st.floats(0, 1)), min_size=1, max_size=6)


@given(works, st.floats(0, 100))
def test_a_step_down_is_never_followed_by_one_up(work: list[ReplicaWork], queued: float) -> None:
    count = desired_replicas(work, len(work), queued, **LIMITS)
    assert count >= max(1, len(work) - 1)
    if count < len(work):
        turns = queued + sum(one.turns for one in work)
        share = sum(one.copy_share for one in work) / count
        merged = [ReplicaWork(turns / count, min(1.0, share))] * count
        assert desired_replicas(merged, count, 0.0, **LIMITS) <= count


def test_the_policy_reads_what_replicas_report() -> None:
    snapshot = make_snapshot()
    figures = work_of(snapshot)
    assert figures[TURNS] == snapshot.kv.mean_turns
    assert 0 <= figures[COPY_SHARE] <= 1
    context = SimpleNamespace(
        aggregated_metrics={TURNS: {"a": 30.0, "late": 9.0}, COPY_SHARE: {"a": 0.0}},
        target_num_replicas=1,
        total_queued_requests=None,
    )
    assert WorkingSetAutoscaling(**LIMITS)(context) == (4, {})
    context.aggregated_metrics = None
    assert WorkingSetAutoscaling(**LIMITS)(context) == (1, {})
