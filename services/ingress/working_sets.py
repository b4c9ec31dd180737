"""The working set to expect of a turn, from what is known of its session, user, prompt and tenant."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_not

from wisp_core.contracts import Signature
from wisp_core.errors import StoreUnavailableError
from wisp_core.routing.views import Uses
from wisp_core.store.interface import ReplicaStore
from wisp_core.working_set.predictor import Evidence, predict, prefill_worth
from wisp_core.working_set.signature import use_rates

MAX_KEYS = 4096
"""Sessions, users, prompts and tenants kept in memory; those used longest ago are dropped."""
MAX_AGE_S = 5.0
"""What is known of a key is read again when a turn needs it and it is older."""


@dataclass(frozen=True, eq=False)
class _Known:
    """What the store said about a key, in the sampled layers; None where it knew nothing."""

    decode: Evidence | None
    prefill: Evidence | None
    scale: float
    read_at_s: float


_NOTHING = _Known(None, None, 1.0, 0.0)


def _known(signature: Signature, top_k: int, now_s: float) -> _Known:
    decode = Uses.of(use_rates(signature, top_k))
    prefill = None
    if signature.prefill_tokens > 0:
        rates = Uses.of(use_rates(signature, top_k, is_prefill=True)).rates
        prefill = Evidence(rates, prefill_worth(signature.prefill_tokens))
    has_decoded = signature.decode_tokens > 0
    return _Known(
        Evidence(decode.rates, signature.decode_tokens) if has_decoded else None, prefill, decode.scale, now_s
    )


@dataclass(frozen=True, eq=False)
class _Expected:
    """What to expect of a turn, and from what."""

    found: Sequence[_Known]
    uses: Uses | None


def _expected(found: Sequence[_Known]) -> Uses | None:
    # A prompt tells of the session that it begins, and of nothing else.
    steps = [*(one.decode for one in found[:-1]), found[-1].prefill, found[-1].decode]
    rates = predict(evidence for evidence in steps if evidence is not None)
    scale = next((one.scale for one in found if one.decode or one.prefill), 1.0)
    return None if rates is None else Uses(rates, scale)


class WorkingSets:
    """One process's memory of signatures. All methods run in one event loop."""

    def __init__(self, store: ReplicaStore) -> None:
        """Nothing is read before it is asked for."""
        self._store = store
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._expected: OrderedDict[str, _Expected] = OrderedDict()

    async def expect(self, keys: Sequence[str], top_k: int) -> Uses | None:
        """The working set to expect under ``keys``, ordered from the most general to the turn's session.

        Reads the store at most once, and not within ``MAX_AGE_S`` of the last time; without it, what is known counts.
        """
        now_s = time.monotonic()
        if any(self._known.get(key, _NOTHING).read_at_s < now_s - MAX_AGE_S for key in keys):
            with contextlib.suppress(StoreUnavailableError):
                await self._read(keys, top_k, now_s)
        found = [self._known.get(key, _NOTHING) for key in keys]
        if not found:
            return None
        before = self._expected.get(keys[-1])
        if before is None or len(before.found) != len(found) or any(map(is_not, before.found, found)):
            # The same until one of them is read again.
            before = self._expected[keys[-1]] = _Expected(found, _expected(found))
            if len(self._expected) > MAX_KEYS:
                self._expected.popitem(last=False)
        return before.uses

    async def _read(self, keys: Collection[str], top_k: int, now_s: float) -> None:
        signatures = await self._store.read_signatures(keys)
        for key in keys:
            signature = signatures.get(key)
            self._known[key] = _Known(None, None, 1.0, now_s) if signature is None else _known(signature, top_k, now_s)
            self._known.move_to_end(key)
        while len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)
