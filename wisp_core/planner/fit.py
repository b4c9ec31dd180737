"""Which split is best for a trace that is there beforehand, and where a policy ends up on it.

A split changes what its replica reports, so that a decision has to be made again where it leads; and such landscapes
have more than one valley. So the search starts from both ends and the middle, follows the decisions until they stay,
and takes of all splits visited the one at which the trace's turns were fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wisp_core.contracts import Decision, ReplicaSnapshot, Split
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.simulation import SimulationSettings, simulate
from wisp_core.simulator.trace import Trace

Decide = Callable[[Split], Sequence[Split]]
"""What a policy wants of a replica that has run the trace at this split, by its `report` or its `reports`, best first.

More than one where the policy sees more than one valley.
"""

_ROUNDS = 6
_REPORTS = 16
_GRID = 32


class _Watcher:
    """A policy that holds, and keeps what it saw."""

    def __init__(self) -> None:
        self.seen = list[ReplicaSnapshot]()

    def initial_state(self) -> None:
        return None

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        self.seen.append(snapshot)
        return Decision(split=snapshot.split, reason="hold: watching"), None


class Fitting:
    """One engine and one trace, and what was simulated of them so far."""

    def __init__(self, model: EngineModel, trace: Trace) -> None:
        self._model, self._trace = model, trace
        self._mean_turn_s: dict[Split, float] = {}
        self._reports: dict[tuple[Split, bool], tuple[ReplicaSnapshot, ...]] = {}

    def mean_turn_s(self, split: Split) -> float:
        """Mean latency of the trace's turns at ``split``."""
        if split not in self._mean_turn_s:
            self._mean_turn_s[split] = simulate(self._trace, self._model, split=split).mean_turn_s
        return self._mean_turn_s[split]

    def report(self, split: Split) -> ReplicaSnapshot:
        """What a replica reports that has run the whole trace at ``split``."""
        return self._observed(split, is_whole=True)[-1]

    def reports(self, split: Split) -> tuple[ReplicaSnapshot, ...]:
        """The same piece by piece: each report is of one stretch of the trace, so that phases stay apart."""
        return self._observed(split, is_whole=False)

    def _observed(self, split: Split, *, is_whole: bool) -> tuple[ReplicaSnapshot, ...]:
        key = (split, is_whole)
        if key not in self._reports:
            self._reports[key] = observe(self._model, self._trace, split, is_whole=is_whole)
        return self._reports[key]

    def fit(self, decide: Decide, *, least_blocks: int) -> Split:
        """The best split that ``decide`` leads to; ``least_blocks`` is κ_min, which bounds the starts."""
        visited = list[Split]()
        for start in self._starts(least_blocks):
            split, seen = start, set[Split]()
            for _ in range(_ROUNDS):
                seen.add(split)
                wanted = decide(split)
                visited += wanted
                split = wanted[0]
                if split in seen:
                    break
        return min(dict.fromkeys(visited), key=self.mean_turn_s)

    def search(self, splits: Sequence[Split]) -> Split:
        """The split at which the trace's turns are fastest, of ``splits``, ascending in cap.

        All of them are simulated where they are few; of many a grid, and then what lies around its two best points.
        """
        step = max(1, len(splits) // _GRID)
        grid = sorted(range(0, len(splits), step), key=lambda place: self.mean_turn_s(splits[place]))
        near = {place + offset for place in grid[:2] for offset in range(1 - step, step)}
        places = [*grid[:2], *sorted(place for place in near if 0 <= place < len(splits))]
        return min((splits[place] for place in places), key=self.mean_turn_s)

    def _starts(self, least_blocks: int) -> list[Split]:
        """The smallest cap, half of the budget, and the largest cap beside κ_min."""
        layout = self._model.layout
        splits = [self._model.largest_split(cap) for cap in range(layout.min_cap, layout.num_experts + 1)]
        feasible = [split for split in splits if split.kv_blocks >= least_blocks]
        ends = [feasible[0], feasible[-1]] if feasible else []
        middle = self._model.half_split()
        return list(dict.fromkeys([middle, *ends] if middle.kv_blocks >= least_blocks or not ends else ends))


def observe(model: EngineModel, trace: Trace, split: Split, *, is_whole: bool = True) -> tuple[ReplicaSnapshot, ...]:
    """What a replica reports, from time to time, that runs all of ``trace`` at ``split``.

    Each report looks back to the start, or (not ``is_whole``) to the one before. Its κ_min is one longest request: what
    ran at the moment of a report bounds no split that is chosen before the start.
    """
    whole_s = simulate(trace, model, split=split).makespan_s
    watcher = _Watcher()
    epoch_s = whole_s / (_REPORTS + 0.001)  # the last report comes just before the end
    settings = SimulationSettings(epoch_s=epoch_s, window_s=whole_s if is_whole else epoch_s)
    simulate(trace, model, split=split, policy=watcher, settings=settings)
    return tuple(
        one.model_copy(
            update={"kv": one.kv.model_copy(update={"floor_blocks": 0}), "window_s": settings.window_s},
        )
        for one in watcher.seen
    )
