"""Which session used which experts: the pager's observer, joined with vLLM's batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import Signature
from wisp_core.engine.step_rows import PrefillRows, StepRows
from wisp_core.working_set.signature import HALF_LIFE_TOKENS, ExpertTally

EVERYONE = ""
"""Key of the tally over all decode rows of the engine."""

MAX_KEYS = 1024
"""Tallies kept; the least recently used one goes first."""

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
        self._decoding: list[str] | None = None
        """Requests of the last step, if each of them decoded, whose rows belong to ``_owners``."""
        self._owners: list[str] = []
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
            self._has_begun, self._decode_rows = True, self._begin_rows(self._rows, is_prefill)
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

    def _begin_rows(self, rows: StepRows, is_prefill: bool) -> list[int] | slice | None:
        """Note who owns the rows; returns which ones decode."""
        if not is_prefill and rows.request_ids() == self._decoding:
            # Who decodes goes on to do so: mostly the batch is that of the step before.
            self._kept.begin(self._owners)
            return slice(len(self._owners))
        self._decoding = None
        decode_rows = rows.decode_rows()
        self._prefill_rows = [found for found in rows.prefill_rows() if found.session_key]
        self._touched.update(found.session_key for found in self._prefill_rows)
        if not decode_rows:
            return None
        owners = [found.session_key for found in decode_rows]
        self._kept.begin(owners)
        places = [found.row for found in decode_rows]
        request_ids = rows.request_ids()
        if len(owners) == len(request_ids):
            self._decoding, self._owners = list(request_ids), owners
        return slice(len(places)) if places[-1] == len(places) - 1 else places

    def _count_kept(self) -> None:
        if not len(self._kept):
            return
        total: dict[str, _Uses] = {}
        for session_key, uses in self._kept.take().items():
            for key in prefixes(session_key):
                total[key] = uses if key not in total else total[key].plus(uses)
        for key, uses in total.items():
            self._tally.add_counts(key, uses.counts, uses.num_rows, uses.hits)
        self._touched.update(total)


class _Uses(NamedTuple):
    counts: npt.NDArray[np.int64]  # [L, E]
    num_rows: int
    hits: int

    def plus(self, other: _Uses) -> _Uses:
        return _Uses(self.counts + other.counts, self.num_rows + other.num_rows, self.hits + other.hits)


class _KeptRows:
    """Decode rows that are not counted yet. Kept as bytes, so that a layer costs two small copies and nothing else."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._shape = (num_layers, num_experts)
        self._dtype: np.dtype[Any] = np.dtype(np.int64)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._owners: list[str] = []  # of all rows
        self._step_of: list[int] = []  # of all rows
        self._num_steps = 0
        # By layer, a piece for each step: ids [rows, top-k], and which experts [E] were there.
        self._ids: list[list[bytes]] = [[] for _ in range(self._shape[0])]
        self._was_resident: list[list[bytes]] = [[] for _ in range(self._shape[0])]

    def __len__(self) -> int:
        return len(self._owners)

    def begin(self, owners: list[str]) -> None:
        """A step with a row of each of these sessions."""
        self._owners += owners
        self._step_of += [self._num_steps] * len(owners)
        self._num_steps += 1

    def add(self, layer_index: int, ids: npt.NDArray[np.integer], was_resident: npt.NDArray[np.bool_]) -> None:
        """The step's ids [rows, top-k] in one layer, and which experts [E] that layer had."""
        self._dtype = ids.dtype
        self._ids[layer_index].append(ids.tobytes())
        self._was_resident[layer_index].append(was_resident.tobytes())

    def take(self) -> dict[str, _Uses]:
        """Uses of each session, and begin anew."""
        owners, step_of, num_steps = self._owners, self._step_of, self._num_steps
        all_ids, all_resident = self._ids, self._was_resident
        self._begin_anew()
        if any(len(pieces) != num_steps for pieces in all_ids):
            return {}  # A step broke off: whose rows are whose cannot be told any more.
        num_layers, num_experts = self._shape
        ids = _joined(all_ids, self._dtype).reshape(num_layers, len(owners), -1)
        was_resident = _joined(all_resident, np.dtype(np.bool_)).reshape(num_layers, num_steps, num_experts)
        layers = np.arange(num_layers)[:, None, None]
        hits = was_resident[layers, np.array(step_of, dtype=np.intp)[None, :, None], ids].sum(axis=(0, 2))
        places: dict[str, int] = {}
        place_of = np.array([places.setdefault(owner, len(places)) for owner in owners], dtype=np.intp)
        flat = (place_of[None, :, None] * num_layers + layers) * num_experts + ids
        counts = np.bincount(flat.reshape(-1), minlength=len(places) * num_layers * num_experts)
        counts = counts.reshape(-1, num_layers, num_experts)
        num_rows, num_hits = np.bincount(place_of), np.bincount(place_of, hits)
        return {
            owner: _Uses(counts[place], int(num_rows[place]), int(num_hits[place])) for owner, place in places.items()
        }


def _joined(pieces_of_layers: list[list[bytes]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join(piece for pieces in pieces_of_layers for piece in pieces), dtype)


def prefixes(session_key: str) -> Iterator[str]:
    """``""``, ``tenant``, ``tenant/user``, ``tenant/user/session``; a session may have slashes of its own."""
    yield EVERYONE
    parts = session_key.split("/", 2) if session_key else []
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth])
