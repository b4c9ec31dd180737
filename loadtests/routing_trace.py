"""Seeded routing that looks like a real model's, to be replayed in every mode of a benchmark.

A model with random weights routes without structure, and two engines that differ in a rounding could route apart. So
the ids come from here: a share of a session's experts repeats from one token to the next, the rest follow a Zipf law
over the experts, in an order that is half shared by all sessions and half the session's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REPEAT = 0.46
"""Probability that an expert is used again for the next token."""

ZIPF_EXPONENT = 1.0

_LEAST_NOISE = np.float32(1e-30)  # a draw may be 0


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What decides a trace; equal configs give equal traces."""

    sessions: int
    positions: int  # tokens of a session, prompt and answer
    layers: int
    experts: int
    top_k: int
    seed: int = 0


def routing_trace(config: TraceConfig) -> npt.NDArray[np.int16]:
    """Routed ids [layers, sessions, positions, top_k], distinct within a token.

    The id of a token depends on its session and its position alone, never on who shares the batch.
    """
    rng = np.random.default_rng(config.seed)
    preference = _preference(config, rng)
    trace = np.empty((config.layers, config.sessions, config.positions, config.top_k), dtype=np.int16)
    shape = preference.shape
    is_kept = np.zeros(shape, dtype=np.bool_)
    for position in range(config.positions):
        # The largest of weight / exponential noise are a weighted draw without replacement.
        noise = rng.standard_exponential(size=shape, dtype=np.float32)
        keys = preference / np.maximum(noise, _LEAST_NOISE)
        keys[is_kept] = np.inf
        ids = np.argpartition(-keys, config.top_k - 1, axis=-1)[..., : config.top_k]
        trace[:, :, position] = ids
        is_kept = np.zeros(shape, dtype=np.bool_)
        np.put_along_axis(is_kept, ids, rng.random(ids.shape) < REPEAT, axis=-1)
    return trace


def _preference(config: TraceConfig, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Weight of each expert, [layers, sessions, experts]."""
    zipf = 1.0 / np.arange(1, config.experts + 1) ** ZIPF_EXPONENT
    shared = rng.permuted(np.tile(zipf, (config.layers, 1, 1)), axis=-1)
    own = rng.permuted(np.tile(zipf, (config.layers, config.sessions, 1)), axis=-1)
    preference: npt.NDArray[np.float32] = ((shared + own) / 2).astype(np.float32)
    return preference
