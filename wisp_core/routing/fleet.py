"""The replicas as a router knows them: a table with a column per figure, so that a decision looks at all at once.

One router process owns a fleet and changes it between decisions; a decision only reads it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wisp_core.routing.hashing import name_hash
from wisp_core.routing.load import Column, Load, load_of
from wisp_core.routing.union import least_kept, union_misses_above
from wisp_core.routing.views import MAX_SAMPLED_LAYERS, ReplicaFigures, RoutingWeights, Uses
from wisp_core.working_set.signature import UseRates

_FIGURES = tuple(field.name for field in dataclasses.fields(ReplicaFigures))
_NAMES = (*_FIGURES, "placed", "is_known", "copies")
_ROWS = {name: row for row, name in enumerate(_NAMES)}
_LOADS = tuple(field.name for field in dataclasses.fields(Load))
_FIRST_CAPACITY = 8


class _Shape(NamedTuple):
    num_layers: int
    num_experts: int


class Fleet:
    """Figures, working sets and names of replicas; a replica keeps its position until it is removed."""

    def __init__(self, weights: RoutingWeights | None = None, max_layers: int = MAX_SAMPLED_LAYERS) -> None:
        """``max_layers``: layers of a working set that are kept."""
        self.weights = weights or RoutingWeights()
        self.ids: list[str] = []
        self.position: dict[str, int] = {}
        self.scale = 1.0
        """Layers that each sampled one stands for."""
        self._max_layers = max_layers
        self._figures = np.zeros((len(_NAMES), _FIRST_CAPACITY))
        self._hashes = np.zeros(_FIRST_CAPACITY, dtype=np.uint64)
        self._rates = np.zeros((_FIRST_CAPACITY, 0, 0), dtype=np.float32)
        self._outside = np.zeros((0, _FIRST_CAPACITY), dtype=np.float32)
        self._least_kept = np.zeros((_FIRST_CAPACITY, 0), dtype=np.float32)
        self._load: Load | None = None
        self._known: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> Column:
        """One figure of every replica, NaN where it is not measured.

        Besides ``ReplicaFigures``: ``is_known``, whether there are any; ``placed``, sessions placed there that
        ``mean_turns`` does not show yet; ``copies``, expert copies per decode step of the turns that run there.
        """
        return self._figures[_ROWS[name], : len(self.ids)]

    @property
    def load(self) -> Load:
        """What a turn costs on each replica."""
        if self._load is None:
            self._known = self._filled()
            self._load = load_of(self._known, self.weights)
        return self._load

    def load_without(self, at: int, sessions: float) -> Load:
        """The same on one replica, if that many of its sessions were not there."""
        _ = self.load
        one = {name: column[at : at + 1] for name, column in self._known.items()}
        return load_of(one, self.weights, absent_sessions=sessions)

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """`name_hash` of every replica, [N]."""
        return self._hashes[: len(self.ids)]

    @property
    def rates(self) -> npt.NDArray[np.float32]:
        """Mean use rates per decode token of what runs on each replica, [N, S, E] over the sampled layers."""
        return self._rates[: len(self.ids)]

    @property
    def least_kept(self) -> npt.NDArray[np.float32]:
        """The C-th largest of each layer's rates, [N, S]."""
        return self._least_kept[: len(self.ids)]

    @property
    def outside(self) -> npt.NDArray[np.float32]:
        """Copies per step that an expert costs which takes a slot there; 0 where it has one, [S·E, N]."""
        return self._outside[:, : len(self.ids)]

    def keep(self, present: Collection[str]) -> None:
        """These replicas exist now: others are dropped, new ones added without figures."""
        for replica_id in [known for known in self.ids if known not in present]:
            self._remove(replica_id)
        for replica_id in present:
            self._add(replica_id)

    def update(self, replica_id: str, figures: ReplicaFigures, own_turns: int = 0) -> None:
        """Take over new figures. ``own_turns`` are in flight from here, whether or not the replica has seen them."""
        at = self._add(replica_id)
        table = self._figures[:, at]
        if table[_ROWS["is_known"]]:
            # The mean of the last window has taken up what was placed before it by now.
            age_s = max(0.0, figures.at_s - table[_ROWS["at_s"]])
            table[_ROWS["placed"]] *= math.exp(-age_s / figures.window_s) if figures.window_s > 0 else 0.0
        has_new_cap = table[_ROWS["cap"]] != figures.cap
        table[: len(_FIGURES)] = [getattr(figures, name) for name in _FIGURES]
        table[_ROWS["is_known"]] = 1.0
        table[_ROWS["turns"]] = max(figures.turns, own_turns)
        if has_new_cap:
            self._set_kept(at)
        self._set_copies(at)
        self._load = None

    def age(self, now_s: float, keep: float) -> None:
        """Time passes at replicas of which there is nothing new: their mean turns go towards those that are there.

        ``keep`` is what of the mean is left; of what was placed, it has taken up the rest.
        """
        self.column("placed")[:] *= keep
        mean_turns = self.column("mean_turns")
        mean_turns[:] = keep * mean_turns + (1.0 - keep) * self.column("turns")
        self.column("at_s")[:] = now_s
        self._load = None

    def set_rates(self, replica_id: str, rates: UseRates | None) -> None:
        """Take over the mean use rates [L, E] of what runs on a replica; None: nothing has run there."""
        at = self._add(replica_id)
        if rates is None:
            self._rates[at] = 0.0
        else:
            uses = Uses.of(rates, self._max_layers)
            if self._rates.shape[1:] != uses.rates.shape:
                self._reshape(_Shape(*uses.rates.shape))
            self._rates[at] = uses.rates
            self.scale = uses.scale
        self._set_kept(at)
        self._set_copies(at)
        self._load = None

    def add_turns(self, replica_id: str, change: int) -> None:
        """Turns were sent to a replica or have ended there."""
        if replica_id in self.position:
            at = self.position[replica_id]
            turns = self._figures[_ROWS["turns"]]
            turns[at] = max(0.0, turns[at] + change)
            self._renew_load(at)

    def note_placed(self, replica_id: str, change: int) -> None:
        """Sessions were placed on a replica, or have left it."""
        if replica_id in self.position:
            at = self.position[replica_id]
            self._figures[_ROWS["placed"], at] += change
            self._renew_load(at)

    def _renew_load(self, at: int) -> None:
        """Derive one replica's load again: of a thousand, one changes with each turn."""
        if self._load is not None:
            renewed = self.load_without(at, 0.0)
            for name in _LOADS:
                getattr(self._load, name)[at] = getattr(renewed, name)[0]

    def _mean_figures(self) -> dict[str, float]:
        """What stands for a figure that a replica has not measured: the others' mean, else a default."""
        row_s = self.weights.default_row_s
        means = {"fixed_s": self.weights.fixed_rows * row_s, "row_s": row_s, "pass_s": 0.0}
        means |= {"pass_tokens": 1.0, "prompt_token_s": 0.0}
        is_known = self.column("is_known") > 0
        for name in means:
            values = self.column(name)[is_known]
            values = values[~np.isnan(values)]
            means[name] = float(values.mean()) if len(values) else means[name]
        return means

    def _filled(self) -> dict[str, Column]:
        """All columns; what is measured somewhere is in every row of its column."""
        columns = {name: self.column(name) for name in _NAMES}
        unknown = columns["is_known"] == 0
        for name, mean in self._mean_figures().items():
            columns[name] = np.where(unknown | np.isnan(columns[name]), mean, columns[name])
        return columns

    def _add(self, replica_id: str) -> int:
        if replica_id in self.position:
            return self.position[replica_id]
        at = len(self.ids)
        if at == self._hashes.shape[0]:
            self._grow()
        self.ids.append(replica_id)
        self.position[replica_id] = at
        self._figures[:, at] = 0.0
        self._hashes[at] = name_hash(replica_id)
        self._rates[at] = 0.0
        self._least_kept[at] = 0.0
        self._outside[:, at] = 0.0
        self._load = None
        return at

    def _remove(self, replica_id: str) -> None:
        """The last replica takes its place."""
        at, last = self.position.pop(replica_id), len(self.ids) - 1
        moved = self.ids.pop()
        if at != last:
            self.ids[at] = moved
            self.position[moved] = at
            self._figures[:, at] = self._figures[:, last]
            self._hashes[at] = self._hashes[last]
            self._rates[at] = self._rates[last]
            self._least_kept[at] = self._least_kept[last]
            self._outside[:, at] = self._outside[:, last]
        self._load = None

    def _grow(self) -> None:
        more = self._hashes.shape[0]
        self._figures = np.pad(self._figures, ((0, 0), (0, more)))
        self._hashes = np.pad(self._hashes, (0, more))
        self._rates = np.pad(self._rates, ((0, more), (0, 0), (0, 0)))
        self._least_kept = np.pad(self._least_kept, ((0, more), (0, 0)))
        self._outside = np.pad(self._outside, ((0, 0), (0, more)))

    def _reshape(self, shape: _Shape) -> None:
        """The first working set says how large they are; those of another model are forgotten."""
        capacity = self._hashes.shape[0]
        self._rates = np.zeros((capacity, *shape), dtype=np.float32)
        self._least_kept = np.zeros((capacity, shape.num_layers), dtype=np.float32)
        self._outside = np.zeros((shape.num_layers * shape.num_experts, capacity), dtype=np.float32)

    def _cap(self, at: int) -> int:
        """Slots per layer; all of them while it is not known, so that nothing is said to miss."""
        num_experts = self._rates.shape[2]
        return min(int(self._figures[_ROWS["cap"], at]) or num_experts, num_experts)

    def _set_copies(self, at: int) -> None:
        """What the turns there miss per step, and what the next one adds with each expert that has no slot."""
        if not self._rates.shape[2]:
            return
        table = self._figures[:, at]
        usual = max(0.0, table[_ROWS["mean_turns"]] + table[_ROWS["placed"]])
        turns = np.float32(max(1.0, (table[_ROWS["turns"]] + usual) / 2))
        rates, kept = self._rates[at], self._least_kept[at]
        copies = union_misses_above(rates[None] * turns, np.array([self._cap(at)]), kept[None] * turns)
        table[_ROWS["copies"]] = max(0.0, copies[0]) * self.scale
        # An expert that is used a lot takes the slot of the least used one, whose needs are then copies.
        is_outside = rates < kept[:, None]
        self._outside[:, at] = (is_outside * -np.expm1(-kept * turns)[:, None]).reshape(-1)

    def _set_kept(self, at: int) -> None:
        if self._rates[at].size:
            self._least_kept[at] = least_kept(self._rates[at], self._cap(at))
