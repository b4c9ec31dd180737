"""The event loop: clients, routing, replicas and policies against one clock.

``simulate(trace, engine)`` runs one replica at a split; give ``num_replicas`` and a ``router`` for more, and a
``policy`` to move the split. Policies and routing are the product's own objects, taken as values.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from wisp_core.allocation.protocol import AllocationPolicy
from wisp_core.contracts import Split
from wisp_core.routing.views import RoutingRequest, RoutingWeights
from wisp_core.simulator.cluster import Cluster, WorkingSets
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.observation import Observer
from wisp_core.simulator.replica import Job, Replica
from wisp_core.simulator.result import Resize, SimulationResult
from wisp_core.simulator.routers import Router, replica_name
from wisp_core.simulator.trace import Trace

_ARRIVAL, _WAKE, _EPOCH = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """How a service runs; times in seconds."""

    epoch_s: float = 2.0
    """Time between a policy's decisions."""
    window_s: float = 60.0
    """Span of the rates that a policy sees."""
    refresh_s: float = 0.25
    """How often routers see replicas anew."""
    link_report: float = 1.0
    """What replicas report of their link's speed, as a factor of what is true."""
    curve_report: float = 1.0
    """The same of their miss curves."""
    follows_recording: bool = False
    """Turns run where the trace says that they ran, without a router."""
    learns_users: bool = False
    """Routers know a user's working set once a turn of that user has ended, as a service's do; False: at once."""


def simulate(
    trace: Trace,
    engine: EngineModel,
    *,
    num_replicas: int = 1,
    split: Split | None = None,
    policy: AllocationPolicy[Any] | None = None,
    router: Router | None = None,
    routing: WorkingSets | None = None,
    weights: RoutingWeights | None = None,
    settings: SimulationSettings | None = None,
) -> SimulationResult:
    """Run ``trace`` to its end.

    Args:
        trace: The workload; turns that the engine's ``max_model_len`` cannot hold are refused and counted.
        engine: Costs of every replica.
        num_replicas: Replicas, all alike.
        split: Where they start; None: the largest cap within half of the budget.
        policy: Moves the split each epoch; wrap it in `policies.damping.Damped` for what a service does. None: static.
        router: Places turns; needed for more than one replica.
        routing: What tells topics' use rates, for routers that look at them.
        weights: Constants of the product's routing.
        settings: Times, and errors of what is reported.

    Raises:
        ValueError: More than one replica and no router.
    """
    if num_replicas > 1 and router is None and not (settings and settings.follows_recording):
        raise ValueError("more than one replica needs a router")
    run = _Run(trace, engine, num_replicas, split or engine.half_split(), policy, router, routing, weights, settings)
    return run.to_end()


@dataclass
class _Policies:
    """A policy with its state for each replica."""

    policy: AllocationPolicy[Any]
    observers: list[Observer]
    states: list[Any]
    resizes: list[Resize] = field(default_factory=list)
    deferred: int = 0


class _Run:
    def __init__(
        self,
        trace: Trace,
        engine: EngineModel,
        num_replicas: int,
        split: Split,
        policy: AllocationPolicy[Any] | None,
        router: Router | None,
        routing: WorkingSets | None,
        weights: RoutingWeights | None,
        settings: SimulationSettings | None,
    ) -> None:
        self._trace, self._engine, self._router = trace, engine, router
        self._settings = settings or SimulationSettings()
        self._read_columns(trace)
        self._replicas = [
            Replica(
                engine,
                split,
                on_first_token=self._note_first_token,
                on_end=self._end_turn,
                measures_reuse=policy is not None,
                window_s=self._settings.window_s,
            )
            for _ in range(num_replicas)
        ]
        self._cluster = Cluster(
            self._replicas,
            routing=routing,
            num_topics=trace.num_topics,
            refresh_s=self._settings.refresh_s,
            weights=weights,
        )
        self._policies = None if policy is None else self._prepare(policy)
        self._events: list[tuple[float, int, int, int, int]] = []  # time, order, kind, subject, version
        self._order = 0
        self._versions = [0] * num_replicas
        self._homes: dict[int, int] = {}
        self._known_users: set[int] = set()
        self._left = len(trace)
        self._phase = -1
        self._phase_left = np.bincount(trace.turns["phase"], minlength=len(trace.phases)).tolist()
        self._held: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)  # by phase: turn, pause

    def _read_columns(self, trace: Trace) -> None:
        turns = trace.turns
        block_tokens = self._engine.layout.block_tokens
        prompts, outputs = turns["prompt_tokens"], turns["output_tokens"]
        blocks, held = -(-(prompts + outputs) // block_tokens), -(-(prompts + outputs // 2) // block_tokens)
        columns = (turns["session"], turns["topic"], prompts, turns["prefix_tokens"], outputs, blocks, held)
        self._jobs = list(map(Job, range(len(trace)), *(column.tolist() for column in columns)))
        self._clients: list[int] = turns["client"].tolist()
        self._at_s: list[float] = turns["at_s"].tolist()
        self._think_s: list[float] = turns["think_s"].tolist()
        self._phases: list[int] = turns["phase"].tolist()
        self._users: list[int] = turns["user"].tolist()
        places = np.maximum(turns["replica"], 0) if self._settings.follows_recording else np.zeros(len(trace), int)
        self._recorded: list[int] = places.tolist()
        self.arrived_s = np.full(len(trace), np.nan)
        self.first_token_s = np.full(len(trace), np.nan)
        self.ended_s = np.full(len(trace), np.nan)
        self.replica_of = np.full(len(trace), -1, dtype=np.int32)

    def _prepare(self, policy: AllocationPolicy[Any]) -> _Policies:
        settings = self._settings
        observers = [
            Observer(
                replica,
                replica_name(number),
                settings.window_s,
                link=settings.link_report,
                curve=settings.curve_report,
            )
            for number, replica in enumerate(self._replicas)
        ]
        return _Policies(policy, observers, [policy.initial_state() for _ in self._replicas])

    def to_end(self) -> SimulationResult:
        """Handle events until every turn has ended."""
        first = [i for i, client in enumerate(self._clients) if i == 0 or self._clients[i - 1] != client]
        for index in first:
            self._schedule_turn(index, 0.0)
        self._open_phases(0.0)
        if self._policies is not None:
            self._push(self._settings.epoch_s, _EPOCH, 0, 0)
        events, versions = self._events, self._versions
        while self._left:
            now_s, _, kind, subject, version = heappop(events)
            self._now_s = now_s
            if kind == _WAKE:
                if version == versions[subject]:
                    self._wake_at(subject, self._replicas[subject].wake(now_s))
            elif kind == _ARRIVAL:
                self._arrive(subject)
            else:
                self._run_epoch()
        return self._result()

    # -- turns ------------------------------------------------------------------------------------------------------

    def _schedule_turn(self, index: int, after_s: float) -> None:
        """Let a client's next turn come; a turn of a later phase is held until that begins."""
        if self._trace.has_barriers and self._phases[index] > self._phase:
            self._held[self._phases[index]].append((index, self._think_s[index]))
            return
        self._push(max(self._at_s[index], after_s + self._think_s[index]), _ARRIVAL, index, 0)

    def _open_phases(self, now_s: float) -> None:
        """Begin the next phases while the ones before have ended."""
        last = len(self._phase_left) - 1
        while self._phase < last and (self._phase < 0 or self._phase_left[self._phase] == 0):
            self._phase += 1
            for index, pause_s in self._held.pop(self._phase, ()):
                self._push(now_s + max(self._at_s[index], pause_s), _ARRIVAL, index, 0)

    def _arrive(self, index: int) -> None:
        now_s, job = self._now_s, self._jobs[index]
        self.arrived_s[index] = now_s
        if job.prompt_tokens + job.output_tokens > self._engine.layout.max_model_len:
            self._follow(index)
            return
        number = self._recorded[index]
        if self._router is not None:
            number = self._place(self._router, index, job)
        self.replica_of[index] = number
        self._cluster.note_home(self._homes.get(job.session), number)
        self._homes[job.session] = number
        self._cluster.begin_turn(number)
        self._wake_at(number, self._replicas[number].arrive(job, now_s))

    def _place(self, router: Router, index: int, job: Job) -> int:
        home = self._homes.get(job.session)
        self._cluster.now_s = self._now_s
        request = RoutingRequest(
            session_key=f"session-{job.session}",
            prompt_tokens=job.prompt_tokens,
            max_tokens=job.output_tokens,
            home=None if home is None else replica_name(home),
            prefix_tokens=job.prefix_tokens,
            uses=self._cluster.uses(job.topic if self._is_known(index) else None),
            mean_turn_s=self._cluster.mean_turn_s,
        )
        return router.place(request, self._cluster)

    def _is_known(self, index: int) -> bool:
        return not self._settings.learns_users or self._users[index] in self._known_users

    def _note_first_token(self, index: int, now_s: float) -> None:
        self.first_token_s[index] = now_s

    def _end_turn(self, index: int, now_s: float) -> None:
        self.ended_s[index] = now_s
        self._known_users.add(self._users[index])
        self._cluster.end_turn(int(self.replica_of[index]), now_s - float(self.arrived_s[index]))
        self._follow(index)

    def _follow(self, index: int) -> None:
        """What comes after a turn: its client's next one, and the next phase."""
        self._left -= 1
        self._phase_left[self._phases[index]] -= 1
        following = index + 1
        if following < len(self._clients) and self._clients[following] == self._clients[index]:
            self._schedule_turn(following, self._now_s + self._engine.turn_s)
        if self._trace.has_barriers:
            self._open_phases(self._now_s)

    # -- replicas ---------------------------------------------------------------------------------------------------

    def _wake_at(self, number: int, at_s: float | None) -> None:
        if at_s is not None:
            self._versions[number] += 1
            self._push(at_s, _WAKE, number, self._versions[number])

    def _run_epoch(self) -> None:
        policies = self._policies
        assert policies is not None
        for number, observer in enumerate(policies.observers):
            snapshot = observer.snapshot(self._now_s)
            decision, policies.states[number] = policies.policy.decide(snapshot, policies.states[number])
            if decision.split != snapshot.split:
                self._resize(policies, number, decision.split)
        self._push(self._now_s + self._settings.epoch_s, _EPOCH, 0, 0)

    def _resize(self, policies: _Policies, number: int, split: Split) -> None:
        replica, before = self._replicas[number], self._replicas[number].split
        moved = replica.resize(split, self._now_s)
        if moved is None:
            policies.deferred += 1
            return
        self._cluster.note_resized(number)
        moved_bytes, wake_s = moved
        policies.resizes.append(Resize(self._now_s, number, before, replica.split, moved_bytes))
        self._wake_at(number, wake_s)

    def _push(self, at_s: float, kind: int, subject: int, version: int) -> None:
        self._order += 1
        heappush(self._events, (at_s, self._order, kind, subject, version))

    def _result(self) -> SimulationResult:
        return SimulationResult(
            trace=self._trace,
            arrived_s=self.arrived_s,
            first_token_s=self.first_token_s,
            ended_s=self.ended_s,
            replica_of=self.replica_of,
            turn_overhead_s=self._engine.turn_s,
            expert_bytes=self._engine.layout.expert_bytes,
            totals=tuple(replica.totals for replica in self._replicas),
            splits=tuple(replica.split for replica in self._replicas),
            resizes=() if self._policies is None else tuple(self._policies.resizes),
            num_deferred=0 if self._policies is None else self._policies.deferred,
        )
