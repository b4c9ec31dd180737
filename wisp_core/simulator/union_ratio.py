"""By how much real decode steps miss more than the union of who decodes, by cap: least squares over a recording."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import ReplicaSnapshot
from wisp_core.routing.union import union_misses_by_cap
from wisp_core.simulator.recording import Recording
from wisp_core.simulator.trace import Trace
from wisp_core.working_set.signature import UseRates

FloatArray = npt.NDArray[np.float64]

_MOST_NEW_SHARE = 0.05


def is_warm(snapshot: ReplicaSnapshot) -> bool:
    """Whether hardly any miss was of an expert that no slot had ever held: those happen once, after the start."""
    curve = snapshot.decode_misses_by_cap
    return bool(curve) and curve[-1] <= _MOST_NEW_SHARE * curve[snapshot.split.cap]


def union_ratio_by_cap(recording: Recording, rates: UseRates) -> FloatArray:
    """Reported misses over those of the union of the sessions that decoded in the report's window, [E + 1].

    A step that should miss much weighs more: what turns of a topic miss when it comes back after others is no part of
    a union, and would be most of what small batches miss.

    Args:
        recording: With snapshots, and measured turns of which the replica is known.
        rates: uses per decode token of each of its topics, [topics, L, E].
    """
    times = _TurnTimes(recording.trace)
    products, squares = np.zeros((2, rates.shape[-1] + 1))
    for snapshot, replica, steps in _steps_between(recording.snapshots):
        tokens = times.tokens_by_topic(replica, snapshot.at_s - recording.started_at_s, snapshot.window_s)
        if tokens.sum() > 0 and is_warm(snapshot) and snapshot.decode_steps_per_s > 0:
            batch = snapshot.decode_tokens_per_s / snapshot.decode_steps_per_s
            rows = (tokens * (batch / tokens.sum())).astype(np.float32)
            union = union_misses_by_cap(np.tensordot(rows, rates, axes=1))
            products += steps * union * snapshot.decode_misses_by_cap
            squares += steps * union**2
    ratios: FloatArray = np.divide(products, squares, out=np.ones_like(products), where=squares > 0)
    return ratios


def _steps_between(snapshots: tuple[ReplicaSnapshot, ...]) -> Iterator[tuple[ReplicaSnapshot, int, int]]:
    """Each snapshot with its replica's number and the decode steps since the one before."""
    numbers = {name: number for number, name in enumerate(sorted({one.replica_id for one in snapshots}))}
    before: dict[str, int] = {}
    for one in snapshots:
        steps = one.decode.steps - before.get(one.replica_id, one.decode.steps)
        before[one.replica_id] = one.decode.steps
        yield one, numbers[one.replica_id], steps


class _TurnTimes:
    """When each turn of a recorded trace decoded, seconds since the trace began."""

    def __init__(self, trace: Trace) -> None:
        self._turns = turns = trace.turns
        self._num_topics = trace.num_topics
        self.ended_s = np.zeros(len(turns))
        began_s = 0.0
        for phase in range(len(trace.phases)) if trace.has_barriers else (None,):
            of_phase = np.arange(len(turns)) if phase is None else np.flatnonzero(turns["phase"] == phase)
            self._play(of_phase, began_s)
            began_s = max(began_s, float(self.ended_s[of_phase].max(initial=0.0)))
        answer_s = turns["duration_s"] - np.nan_to_num(turns["ttft_s"])
        self.first_token_s = self.ended_s - answer_s

    def _play(self, indices: npt.NDArray[np.intp], began_s: float) -> None:
        """Each client's turns of a phase one after the other."""
        ended_s: dict[int, float] = {}
        for index in indices.tolist():
            turn = self._turns[index]
            client = int(turn["client"])
            start_s = max(began_s + turn["at_s"], ended_s.get(client, began_s) + turn["think_s"])
            ended_s[client] = self.ended_s[index] = start_s + turn["duration_s"]

    def tokens_by_topic(self, replica: int, now_s: float, memory_s: float) -> FloatArray:
        """Tokens that turns there had decoded at ``now_s``, those ``memory_s`` seconds ago weighing 1 / e."""
        until_s = np.minimum(self.ended_s, now_s)
        lasted_s = self.ended_s - self.first_token_s
        is_there = (self._turns["replica"] == replica) & (until_s > self.first_token_s) & (memory_s > 0)
        first_s, until_s, lasted_s = (times[is_there] for times in (self.first_token_s, until_s, lasted_s))
        tokens = self._turns["output_tokens"][is_there] / lasted_s
        weights = tokens * (np.exp((until_s - now_s) / memory_s) - np.exp((first_s - now_s) / memory_s))
        by_topic = np.bincount(self._turns["topic"][is_there], weights=weights, minlength=self._num_topics)
        return by_topic.astype(np.float64)
