"""Where turns go in the simulator: the product's own routing, and the routers it is compared with.

A router is any object with ``place``; it gets the product's `RoutingRequest` and answers with a replica's number.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from wisp_core.routing.fleet import Fleet
from wisp_core.routing.hashing import Hashes, hash_fractions, name_hash
from wisp_core.routing.route import route
from wisp_core.routing.views import RoutingRequest


class ClusterView(Protocol):
    """What a router may look at."""

    @property
    def num_replicas(self) -> int:
        """Replicas, numbered from 0."""
        ...

    def num_turns(self, replica: int) -> int:
        """Turns at a replica at this moment, waiting ones included."""
        ...

    def fleet(self) -> Fleet:
        """Every replica as a router of the service knows it: as old as the routing's refresh, own turns counted."""
        ...

    @property
    def now_s(self) -> float:
        """Time since the start."""
        ...


class Router(Protocol):
    """Decides where a turn runs."""

    def place(self, request: RoutingRequest, cluster: ClusterView) -> int:
        """Number of the replica. ``request.home`` is where the session's last turn ran."""
        ...


class ScoredRouter:
    """`wisp_core.routing.route.route`, as the service's router calls it; its weights are the fleet's."""

    def place(self, request: RoutingRequest, cluster: ClusterView) -> int:
        """The first of the ranking."""
        return replica_number(route(request, cluster.fleet(), cluster.now_s).chosen)


class PowerOfTwoRouter:
    """Ray Serve's own: two replicas at random, the one with fewer turns; sessions have no home."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def place(self, request: RoutingRequest, cluster: ClusterView) -> int:
        """The less loaded of two."""
        if cluster.num_replicas == 1:
            return 0
        one, other = self._rng.choice(cluster.num_replicas, size=2, replace=False).tolist()
        return int(one if cluster.num_turns(one) <= cluster.num_turns(other) else other)


class HashRouter:
    """Consistent hashing of the session: what the service falls back to without telemetry."""

    def __init__(self) -> None:
        self._homes: dict[str, int] = {}
        self._hashes: Hashes = np.zeros(0, dtype=np.uint64)

    def place(self, request: RoutingRequest, cluster: ClusterView) -> int:
        """The session's own replica."""
        if len(self._hashes) != cluster.num_replicas:
            names = map(replica_name, range(cluster.num_replicas))
            self._hashes = np.array([name_hash(name) for name in names], dtype=np.uint64)
        home = self._homes.get(request.session_key)
        if home is None:
            home = int(np.argmin(hash_fractions(request.session_key, self._hashes)))
            self._homes[request.session_key] = home
        return home


class StickyLeastTurnsRouter:
    """A session stays where its first turn went, the replica with the fewest turns of all at that moment."""

    def place(self, request: RoutingRequest, cluster: ClusterView) -> int:
        """Home, or the emptiest."""
        if request.home is not None:
            return replica_number(request.home)
        return min(range(cluster.num_replicas), key=cluster.num_turns)


def replica_name(number: int) -> str:
    """Id of replica ``number`` in requests and views."""
    return f"replica-{number}"


def replica_number(name: str) -> int:
    """The number in a replica's id."""
    return int(name.removeprefix("replica-"))
