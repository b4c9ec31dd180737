"""Which session used which experts in its decode steps: the pager's observer, joined with vLLM's batch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wisp_core.engine.reports import SignatureReport
from wisp_core.engine.step_rows import DecodeRow, StepRows
from wisp_core.working_set.signature import ExpertTally, pack

EVERYONE = ""
"""Key of the tally over all decode rows of the engine."""

MAX_KEYS = 1024
"""Tallies kept; the least recently used one goes first."""


@dataclass(frozen=True)
class _LayerUse:
    layer: int
    topk_ids: npt.NDArray[np.integer]  # [decode rows, top_k]
    was_resident: npt.NDArray[np.bool_]  # [E]


@dataclass
class _Entry:
    tally: ExpertTally
    decode_tokens: int = 0
    lookups: int = 0
    hits: int = 0


class SessionTally:
    """Counts decode rows by session, and again for the session's user and tenant.

    Keys are paths (``tenant/user/session``), and each prefix of a key has a tally of its own.
    """

    def __init__(self, *, num_layers: int, num_experts: int, max_keys: int = MAX_KEYS) -> None:
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._max_keys = max_keys
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._touched: set[str] = set()
        self._rows: StepRows | None = None
        self._decode_rows: list[DecodeRow] | None = None
        self._uses: list[_LayerUse] = []

    def __len__(self) -> int:
        return len(self._entries)

    def begin_step(self, rows: StepRows) -> None:
        """A step starts; who owns its rows is read when the first layer runs."""
        self._rows, self._decode_rows, self._uses = rows, None, []

    def observe(
        self,
        layer_index: int,
        topk_ids: npt.NDArray[np.integer],
        was_resident: npt.NDArray[np.bool_],
        is_prefill: bool,
    ) -> None:
        """Keep the decode rows of one layer; a step that also prefills may have some."""
        if self._rows is None:
            return
        if self._decode_rows is None:
            self._decode_rows = self._rows.decode_rows()
        if self._decode_rows:
            rows = [found.row for found in self._decode_rows]
            self._uses.append(_LayerUse(layer_index, topk_ids[rows], was_resident))

    def end_step(self) -> None:
        """Add what the step used to the tallies."""
        rows_by_key: dict[str, list[int]] = defaultdict(list)
        for place, found in enumerate(self._decode_rows or ()):
            for key in prefixes(found.session_key):
                rows_by_key[key].append(place)
        if self._uses:
            for key, places in rows_by_key.items():
                self._add(key, places)
        self._rows, self._decode_rows, self._uses = None, None, []

    def export_touched(self) -> list[SignatureReport]:
        """Tallies of the keys that changed since the last call, in full."""
        touched, self._touched = self._touched, set()
        return [self._report(key, self._entries[key]) for key in sorted(touched) if key in self._entries]

    def _add(self, key: str, places: list[int]) -> None:
        counts = np.zeros((self._num_layers, self._num_experts), dtype=np.int64)
        hits = 0
        for use in self._uses:
            counts[use.layer] += np.bincount(use.topk_ids[places].ravel(), minlength=self._num_experts)
            hits += int(np.count_nonzero((counts[use.layer] > 0) & use.was_resident))
        entry = self._entry(key)
        entry.tally.add(counts)
        entry.decode_tokens += len(places)
        entry.lookups += int(np.count_nonzero(counts))
        entry.hits += hits
        self._touched.add(key)

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(ExpertTally(self._num_layers, self._num_experts))
            if len(self._entries) > self._max_keys:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return entry

    def _report(self, key: str, entry: _Entry) -> SignatureReport:
        return SignatureReport(
            key=key,
            weights=pack(entry.tally.weights()),
            decode_tokens=entry.decode_tokens,
            lookups=entry.lookups,
            hits=entry.hits,
        )


def prefixes(session_key: str) -> Iterator[str]:
    """``""``, ``tenant``, ``tenant/user``, ``tenant/user/session``."""
    yield EVERYONE
    parts = session_key.split("/") if session_key else []
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth])
