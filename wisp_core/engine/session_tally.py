"""Which session used which experts: the pager's observer, joined with vLLM's batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

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


class SessionTally:
    """Counts decode rows by session, and again for the session's user, its tenant and the whole engine.

    Keys are paths (``tenant/user/session``), and each prefix of a key has a tally of its own. Prefill rows are counted
    for their session only, and apart: a prefill uses nearly every expert and would level all signatures.
    """

    def __init__(self, *, num_layers: int, num_experts: int, max_keys: int = MAX_KEYS) -> None:
        self._tally = ExpertTally(num_layers, num_experts, HALF_LIFE_TOKENS, max_keys)
        self._touched: set[str] = set()
        self._rows: StepRows | None = None
        self._rows_by_key: dict[str, list[int]] | None = None
        self._prefill_rows: list[PrefillRows] = []

    def __len__(self) -> int:
        return len(tuple(self._tally.keys()))

    def begin_step(self, rows: StepRows) -> None:
        """A step starts; who owns its rows is read when its first layer runs."""
        self._rows, self._rows_by_key = rows, None

    def end_step(self) -> None:
        """The step is over; forwards outside a step (profiling) are not counted."""
        self._rows, self._rows_by_key = None, None

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
        if self._rows_by_key is None:
            self._rows_by_key = _by_key(self._rows)
            self._prefill_rows = [found for found in self._rows.prefill_rows() if found.session_key]
            self._touched.update(self._rows_by_key, (found.session_key for found in self._prefill_rows))
        for found in self._prefill_rows:
            self._tally.add(
                found.session_key, layer_index, topk_ids[found.start : found.stop], was_resident, is_prefill=True
            )
        for key, rows in self._rows_by_key.items():
            self._tally.add(key, layer_index, topk_ids[rows], was_resident, is_prefill=False)

    def export_touched(self) -> list[Signature]:
        """Signatures of the keys that changed since the last call, in full."""
        touched, self._touched = self._touched, set()
        signatures = (self._tally.signature(key) for key in sorted(touched))
        return [signature for signature in signatures if signature is not None]


def prefixes(session_key: str) -> Iterator[str]:
    """``""``, ``tenant``, ``tenant/user``, ``tenant/user/session``; a session may have slashes of its own."""
    yield EVERYONE
    parts = session_key.split("/", 2) if session_key else []
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth])


def _by_key(rows: StepRows) -> dict[str, list[int]]:
    by_key: dict[str, list[int]] = defaultdict(list)
    for found in rows.decode_rows():
        for key in prefixes(found.session_key):
            by_key[key].append(found.row)
    return by_key
