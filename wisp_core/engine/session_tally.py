"""Which session used which experts: the pager's observer, joined with vLLM's batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import Signature
from wisp_core.engine.step_rows import PrefillRows, StepRows
from wisp_core.working_set.signature import ExpertTally

EVERYONE = ""
"""Key of the tally over all decode rows of the engine."""

MAX_KEYS = 1024
"""Tallies kept; the least recently used one goes first."""

HALF_LIFE_TOKENS = 500.0
"""Decode tokens of a key after which a use weighs half."""


FLUSH_ROWS = 256
"""Decode rows that are kept before they are counted, all at once: by row it would take a step's time."""


class SessionTally:
    """Counts decode rows by session, and again for the session's user, its tenant and the whole engine.

    Keys are paths (``tenant/user/session``), and each prefix of a key has a tally of its own. Prefill rows are counted
    for their session only, and apart: a prefill uses nearly every expert and would level all signatures.
    """

    def __init__(self, *, num_layers: int, num_experts: int, max_keys: int = MAX_KEYS) -> None:
        self._shape = (num_layers, num_experts)
        self._tally = ExpertTally(num_layers, num_experts, HALF_LIFE_TOKENS, max_keys)
        self._touched: set[str] = set()
        self._rows: StepRows | None = None
        self._has_begun = False
        self._decode_rows: list[int] | slice | None = None
        self._prefill_rows: list[PrefillRows] = []
        self._kept = _KeptRows(*self._shape)

    def __len__(self) -> int:
        self._count_kept()
        return len(tuple(self._tally.keys()))

    def begin_step(self, rows: StepRows) -> None:
        """A step starts; who owns its rows is read when its first layer runs."""
        self._rows, self._has_begun = rows, False

    def end_step(self) -> None:
        """The step is over; forwards outside a step (profiling) are not counted."""
        self._rows, self._has_begun = None, False
        if len(self._kept) >= FLUSH_ROWS:
            self._count_kept()

    def observe(
        self,
        layer_index: int,
        topk_ids: npt.NDArray[np.integer],
        was_resident: npt.NDArray[np.bool_],
        is_prefill: bool,
    ) -> None:
        """Count the rows of one layer; a step that prefills may have decode rows as well."""
        if self._rows is None:
            return
        if not self._has_begun:
            self._has_begun, self._decode_rows = True, self._begin_rows(self._rows)
        for found in self._prefill_rows:
            self._tally.add_prefill(found.session_key, layer_index, topk_ids[found.start : found.stop])
        if self._decode_rows is not None:
            self._kept.add(layer_index, topk_ids[self._decode_rows], was_resident)

    def export_touched(self) -> list[Signature]:
        """Signatures of the keys that changed since the last call, in full."""
        self._count_kept()
        touched, self._touched = self._touched, set()
        signatures = (self._tally.signature(key) for key in sorted(touched))
        return [signature for signature in signatures if signature is not None]

    def _begin_rows(self, rows: StepRows) -> list[int] | slice | None:
        """Note who owns the rows; returns which ones decode."""
        decode_rows = rows.decode_rows()
        self._prefill_rows = [found for found in rows.prefill_rows() if found.session_key]
        self._touched.update(found.session_key for found in self._prefill_rows)
        if not decode_rows:
            return None
        self._kept.begin([found.session_key for found in decode_rows])
        places = [found.row for found in decode_rows]
        return slice(len(places)) if places[-1] == len(places) - 1 else places

    def _count_kept(self) -> None:
        if not len(self._kept):
            return
        for session_key, uses in self._kept.take().items():
            for key in prefixes(session_key):
                self._tally.add_counts(key, uses.counts, uses.num_rows, uses.hits)
                self._touched.add(key)


class _Uses(NamedTuple):
    counts: npt.NDArray[np.int64]  # [L, E]
    num_rows: int
    hits: int


class _KeptRows:
    """Decode rows that are not counted yet. Kept in arrays that are there, so that a layer costs two copies."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._shape = (num_layers, num_experts)
        self._owners: list[str] = []  # of all rows
        self._step_of: list[int] = []  # of all rows
        self._start = 0  # first row of the step that runs
        self._step = -1
        self._ids = np.zeros((num_layers, 0, 0), dtype=np.int64)  # [L, rows, top-k]
        self._was_resident = np.zeros((num_layers, FLUSH_ROWS, num_experts), dtype=np.bool_)  # [L, steps, E]

    def __len__(self) -> int:
        return len(self._owners)

    def begin(self, owners: list[str]) -> None:
        """A step with a row of each of these sessions; fewer steps than ``FLUSH_ROWS`` are kept."""
        self._start, self._step = len(self._owners), self._step + 1
        self._owners += owners
        self._step_of += [self._step] * len(owners)

    def add(self, layer_index: int, ids: npt.NDArray[np.integer], was_resident: npt.NDArray[np.bool_]) -> None:
        """The step's ids [rows, top-k] in one layer, and which experts [E] that layer had."""
        if self._ids.shape[1] < len(self._owners):
            self._grow(ids.shape[1])
        self._ids[layer_index, self._start : len(self._owners)] = ids
        self._was_resident[layer_index, self._step] = was_resident

    def take(self) -> dict[str, _Uses]:
        """Uses of each session, and begin anew."""
        ids = self._ids[:, : len(self._owners)]
        layers = np.arange(self._shape[0])[:, None, None]
        hits = self._was_resident[layers, np.array(self._step_of, dtype=np.intp)[None, :, None], ids]
        places: dict[str, list[int]] = defaultdict(list)
        for place, owner in enumerate(self._owners):
            places[owner].append(place)
        self._owners, self._step_of, self._start, self._step = [], [], 0, -1
        return {
            owner: _Uses(self._counts(ids[:, own]), len(own), int(hits[:, own].sum())) for owner, own in places.items()
        }

    def _grow(self, top_k: int) -> None:
        kept = self._ids
        self._ids = np.zeros((self._shape[0], len(self._owners) + FLUSH_ROWS, top_k), dtype=np.int64)
        self._ids[:, : kept.shape[1], : kept.shape[2]] = kept

    def _counts(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        num_layers, num_experts = self._shape
        flat = ids.reshape(num_layers, -1) + np.arange(num_layers)[:, None] * num_experts
        return np.bincount(flat.reshape(-1), minlength=num_layers * num_experts).reshape(self._shape)


def prefixes(session_key: str) -> Iterator[str]:
    """``""``, ``tenant``, ``tenant/user``, ``tenant/user/session``; a session may have slashes of its own."""
    yield EVERYONE
    parts = session_key.split("/", 2) if session_key else []
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth])
