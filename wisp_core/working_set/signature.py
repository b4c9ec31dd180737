"""Signatures: which experts somebody (a session, user, tenant or replica) uses, small enough to send around.

A signature holds decayed use counts [layers, experts], each layer scaled so that its largest is 255, as bytes.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import Signature

Usage = npt.NDArray[np.floating]
"""Use counts or weights, not negative; [..., L, E]."""

UseRates = npt.NDArray[np.float32]
"""Expected uses per token, [L, E]; each at most 1, each layer sums to top-k at most."""


def pack(counts: Usage) -> bytes:
    """Compress ``counts`` [L, E] to relative use within each layer, 8 bits each."""
    largest = counts.max(axis=1, keepdims=True)
    scaled = np.divide(counts, largest, out=np.zeros(counts.shape), where=largest > 0)
    return zlib.compress(np.rint(scaled * 255).astype(np.uint8).tobytes(), level=1)


def unpack(signature: Signature, *, is_prefill: bool = False) -> npt.NDArray[np.float32]:
    """Weights of ``signature`` in [0, 1], [L, E]. Raises ValueError when its bytes do not fit its shape.

    ``is_prefill``: those of its prefills, all zero where there were none.
    """
    packed = signature.prefill_weights if is_prefill else signature.weights
    num_bytes = signature.num_layers * signature.num_experts
    if is_prefill and not packed:
        return np.zeros((signature.num_layers, signature.num_experts), dtype=np.float32)
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(packed, num_bytes + 1)  # bounded: bytes come from another process
    except zlib.error as error:
        raise ValueError(f"signature {signature.key!r}: weights are not zlib data") from error
    if len(raw) != num_bytes:
        raise ValueError(f"signature {signature.key!r}: weights do not hold {num_bytes} bytes")
    weights = np.frombuffer(raw, dtype=np.uint8).reshape(signature.num_layers, signature.num_experts)
    return weights.astype(np.float32) / np.float32(255)


def merge(key: str, signatures: Iterable[Signature]) -> Signature:
    """One signature of several of one shape, each with the weight of its tokens, prefills apart.

    Raises ValueError for none, for shapes that differ, and like `unpack`.
    """
    found = list(signatures)
    shapes = {(signature.num_layers, signature.num_experts) for signature in found}
    if len(shapes) != 1:
        raise ValueError(f"signature {key!r}: {len(found)} signatures of {len(shapes)} shapes cannot be merged")
    ((num_layers, num_experts),) = shapes
    counts, prefill_counts = np.zeros((2, num_layers, num_experts))
    for signature in found:
        counts += _shares(unpack(signature)) * signature.decode_tokens
        prefill_counts += _shares(unpack(signature, is_prefill=True)) * signature.prefill_tokens
    return Signature(
        key=key,
        num_layers=num_layers,
        num_experts=num_experts,
        weights=pack(counts),
        prefill_weights=pack(prefill_counts) if prefill_counts.any() else b"",
        prefill_tokens=sum(signature.prefill_tokens for signature in found),
        decode_tokens=sum(signature.decode_tokens for signature in found),
        lookups=sum(signature.lookups for signature in found),
        hits=sum(signature.hits for signature in found),
    )


def _shares(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each layer's weights as shares of its sum; all zero where nothing is used."""
    totals = weights.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float32] = np.divide(weights, totals, out=np.zeros_like(weights), where=totals > 0)
    return shares


def use_rates(signature: Signature, top_k: int, *, is_prefill: bool = False) -> UseRates:
    """Expected uses per token [L, E] of who has this signature. Raises ValueError like `unpack`."""
    weights = unpack(signature, is_prefill=is_prefill)
    per_layer = float(top_k)
    if not is_prefill and signature.decode_tokens > 0 and signature.num_layers > 0:
        per_layer = min(per_layer, signature.lookups / (signature.decode_tokens * signature.num_layers))
    sums = weights.sum(axis=1, keepdims=True)
    rates = np.divide(weights * np.float32(per_layer), sums, out=np.zeros_like(weights), where=sums > 0)
    capped: UseRates = np.minimum(rates, np.float32(1.0))
    return capped


HALF_LIFE_TOKENS = 500.0
"""Decode tokens of a key after which a use weighs half."""


@dataclass(slots=True)
class _Entry:
    counts: npt.NDArray[np.float64]  # [L, E], decode steps
    prefill_counts: npt.NDArray[np.float64] | None = None  # [L, E]
    decode_tokens: int = 0
    prefill_tokens: int = 0
    lookups: int = 0
    hits: int = 0


class ExpertTally:
    """Decayed use counts by key, from the pager's observer."""

    def __init__(self, num_layers: int, num_experts: int, half_life_tokens: float, max_keys: int) -> None:
        """Counts halve every ``half_life_tokens`` rows of their key; beyond ``max_keys`` the stalest key goes."""
        self._shape = (num_layers, num_experts)
        self._decay = 0.5 ** (1.0 / half_life_tokens)
        self._max_keys = max_keys
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def add_prefill(self, key: str, layer_index: int, topk_ids: npt.NDArray[np.integer]) -> None:
        """Count the prompt rows [rows, top-k] of one key in one layer of one forward.

        They are kept apart from decode rows: a prompt uses nearly every expert and would level everything.
        """
        entry = self._entry(key)
        if entry.prefill_counts is None:
            entry.prefill_counts = np.zeros(self._shape)
        row = entry.prefill_counts[layer_index]
        row *= self._decay ** len(topk_ids)
        row += np.bincount(topk_ids.reshape(-1), minlength=self._shape[1])
        entry.prefill_tokens += len(topk_ids) if layer_index == 0 else 0

    def add_counts(self, key: str, counts: npt.NDArray[np.integer], num_rows: int, hits: int) -> None:
        """Count ``num_rows`` decode rows of one key at once: uses [L, E], ``hits`` of them found resident."""
        entry = self._entry(key)
        entry.counts *= self._decay**num_rows
        entry.counts += counts
        entry.lookups += int(counts.sum())
        entry.hits += hits
        entry.decode_tokens += num_rows

    def keys(self) -> Iterable[str]:
        """Known keys, the stalest first."""
        return tuple(self._entries)

    def signature(self, key: str) -> Signature | None:
        """Signature of a key; None if nothing is known about it."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return Signature(
            key=key,
            num_layers=self._shape[0],
            num_experts=self._shape[1],
            weights=pack(entry.counts),
            prefill_weights=b"" if entry.prefill_counts is None else pack(entry.prefill_counts),
            prefill_tokens=entry.prefill_tokens,
            decode_tokens=entry.decode_tokens,
            lookups=entry.lookups,
            hits=entry.hits,
        )

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(np.zeros(self._shape))
            if len(self._entries) > self._max_keys:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return entry
