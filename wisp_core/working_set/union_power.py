"""A union's size by batch where only its mean is known: a power of the batch through one row's top-k."""

from __future__ import annotations

import math


def power_union(*, batch: float, union: float, top_k: int, rows: int) -> tuple[float, ...]:
    """Index b: distinct experts of one layer that b decode rows need together; length ``rows`` + 1.

    Empty where the mean tells nothing of how it grows.

    Args:
        batch: Mean rows of a step.
        union: Mean distinct experts of such a step and one layer.
        top_k: Experts of one row.
        rows: The largest batch of the curve.
    """
    if batch <= 1.0 or union <= 0.0:
        return ()
    growth = min(1.0, max(0.0, math.log(union / top_k) / math.log(batch)))
    return (0.0, *(top_k * b**growth for b in range(1, rows + 1)))
