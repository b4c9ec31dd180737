"""All replicas of a simulation as routers see them."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wisp_core.routing.fleet import Fleet
from wisp_core.routing.views import ReplicaFigures, RoutingWeights, Uses
from wisp_core.simulator.replica import Replica
from wisp_core.simulator.routers import replica_name
from wisp_core.working_set.signature import HALF_LIFE_TOKENS


class WorkingSets(Protocol):
    """Who knows what topics use."""

    def use_rates(self, num_topics: int) -> npt.NDArray[np.float32]:
        """Expected uses per decode token of each topic, [topics, layers, E]."""
        ...


class _Reported:
    """What a replica has reported of itself, in which recent times weigh more: whom it decoded for, how it prefills."""

    def __init__(self, num_topics: int) -> None:
        self.tokens = np.zeros(num_topics)
        """Decode tokens by topic, halved every `HALF_LIFE_TOKENS` of the replica."""
        self.prefill_share = 0.0
        """Part of the time that prefill passes took."""
        self._at_s = 0.0
        self._span_s = 0.0
        self._decode_tokens = 0.0
        self._pass_s = 0.0
        self._decoding = np.zeros(num_topics)

    def observe(self, replica: Replica, now_s: float) -> None:
        """Take up what has happened until now."""
        totals, since_s = replica.totals, now_s - self._at_s
        keep = math.exp(-since_s / replica.window_s)
        pass_s = self.prefill_share * self._span_s * keep + totals.pass_s - self._pass_s
        self._span_s = self._span_s * keep + since_s
        self.prefill_share = pass_s / self._span_s if self._span_s > 0 else 0.0
        # Those that decoded at the last report, and those that do now.
        before, self._decoding = self._decoding, np.zeros(len(self.tokens))
        for topic, turns in replica.topics.items():
            self._decoding[topic] = turns
        turns_by_topic = before + self._decoding
        tokens = totals.decode_tokens - self._decode_tokens
        if tokens > 0 and turns_by_topic.any():
            self.tokens *= 0.5 ** (tokens / HALF_LIFE_TOKENS)
            self.tokens += tokens * turns_by_topic / turns_by_topic.sum()
        self._at_s, self._decode_tokens, self._pass_s = now_s, totals.decode_tokens, totals.pass_s


class Cluster:
    """Replicas, and the fleet that a service's router would keep of them: refreshed as often as it refreshes."""

    def __init__(
        self,
        replicas: list[Replica],
        *,
        routing: WorkingSets | None,
        num_topics: int,
        refresh_s: float,
        weights: RoutingWeights | None = None,
    ) -> None:
        """``routing`` tells the use rates of topics; without it routers know none."""
        self._replicas = replicas
        self._refresh_s = refresh_s
        self._refreshed_s = -np.inf
        self._fleet: Fleet | None = None
        self._weights = weights
        self._turns = [0] * len(replicas)
        self._reported = [_Reported(num_topics) for _ in replicas]
        self._stale: set[int] = set(range(len(replicas)))
        self.mean_turn_s = 1.0
        self.now_s = 0.0
        self._rates = None if routing is None else routing.use_rates(num_topics)
        self._uses = [] if self._rates is None else [Uses.of(rates) for rates in self._rates]
        self._uses_of_all = None if self._rates is None else Uses.of(self._rates.mean(axis=0))

    @property
    def num_replicas(self) -> int:
        """Replicas."""
        return len(self._replicas)

    def num_turns(self, replica: int) -> int:
        """Turns there now."""
        return self._turns[replica]

    def uses(self, topic: int | None) -> Uses | None:
        """The working set of a session on ``topic``; None: of nobody knows which, so of all."""
        return self._uses[topic] if self._uses and topic is not None else self._uses_of_all

    def begin_turn(self, replica: int) -> None:
        """A turn was sent there."""
        self._change(replica, 1)

    def end_turn(self, replica: int, duration_s: float) -> None:
        """It has ended."""
        self._change(replica, -1)
        self.mean_turn_s += 0.05 * (duration_s - self.mean_turn_s)

    def note_resized(self, replica: int) -> None:
        """Its split is another one."""
        self._stale.add(replica)

    def note_home(self, before: int | None, now: int) -> None:
        """A session was placed."""
        if self._fleet is not None and before != now:
            self._fleet.note_placed(replica_name(now), 1)
            if before is not None:
                self._fleet.note_placed(replica_name(before), -1)

    def fleet(self) -> Fleet:
        """Every replica, as of the last refresh; own turns as of now."""
        if self._fleet is None:
            self._fleet = Fleet(self._weights)
            self._fleet.keep([replica_name(number) for number in range(len(self._replicas))])
            self._refresh(self._fleet)
        elif self.now_s - self._refreshed_s >= self._refresh_s:
            self._refresh(self._fleet)
        return self._fleet

    def _change(self, replica: int, change: int) -> None:
        self._turns[replica] += change
        self._stale.add(replica)
        if self._fleet is not None:
            self._fleet.add_turns(replica_name(replica), change)

    def _refresh(self, fleet: Fleet) -> None:
        """Figures of replicas where something happened; the others only age."""
        since_s = self.now_s - self._refreshed_s
        if math.isfinite(since_s):
            fleet.age(self.now_s, math.exp(-since_s / self._replicas[0].window_s))
        for number in self._stale:
            name, reported = replica_name(number), self._reported[number]
            reported.observe(self._replicas[number], self.now_s)
            fleet.update(name, self._figures(number), self._turns[number])
            if self._rates is not None and reported.tokens.any():
                shares = reported.tokens / reported.tokens.sum()
                fleet.set_rates(name, np.tensordot(shares, self._rates, axes=1).astype(np.float32))
        self._refreshed_s = self.now_s
        self._stale.clear()

    def _figures(self, number: int) -> ReplicaFigures:
        replica = self._replicas[number]
        model, layout, totals = replica.model, replica.model.layout, replica.totals
        return ReplicaFigures(
            at_s=self.now_s,
            is_healthy=1.0,
            is_draining=0.0,
            is_resizing=0.0,
            cap=replica.cap,
            copy_s=model.copy_s,
            fixed_s=model.step_s,
            row_s=model.row_s + model.distinct_s * layout.top_k * layout.num_layers,
            pass_s=totals.pass_link_s / totals.passes + model.pass_s if totals.passes else np.nan,
            pass_tokens=totals.pass_tokens / totals.passes if totals.passes else np.nan,
            max_pass_tokens=model.pass_tokens,
            use_share=layout.top_k / layout.num_experts,
            prompt_token_s=model.token_s,
            prefill_share=min(0.8, self._reported[number].prefill_share),
            block_tokens=layout.block_tokens,
            kv_blocks=replica.cache.capacity,
            free_blocks=max(0, replica.cache.capacity - replica.cache.running_blocks),
            cached_blocks=replica.cache.cached_blocks,
            max_num_seqs=layout.max_num_seqs,
            turns=self._turns[number],
            waiting_turns=len(replica.waiting),
            mean_turns=replica.recent_turns(self.now_s),
            window_s=replica.window_s,
        )
