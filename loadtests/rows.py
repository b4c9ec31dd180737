"""Rows of figures, the form in which all benchmarks hand on what they measured; and their quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
"""Figures by name; a name ends with its unit."""


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed; NaN for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
