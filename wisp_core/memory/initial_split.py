"""The split that an engine starts with, a real one or a simulated one."""

from __future__ import annotations

from wisp_core.contracts import MemoryLayout, Split
from wisp_core.errors import ConfigurationError


def initial_split(layout: MemoryLayout, *, budget_bytes: int, cap: int | None) -> Split:
    """``cap`` slots, or the largest cap within half of the budget; the rest is KV, at least κ_min.

    Raises ConfigurationError when ``cap`` leaves less KV than κ_min, with the largest cap that fits.
    """
    room_bytes = budget_bytes - layout.kv_bytes(layout.longest_request_blocks)
    caps = range(layout.min_cap, layout.num_experts + 1)
    possible = [c for c in caps if layout.experts_bytes_by_cap[c] <= room_bytes]
    if not possible or (cap is not None and cap not in possible):
        largest = f"the largest cap that does is {possible[-1]}" if possible else "no cap does: raise vram_budget_bytes"
        raise ConfigurationError(
            f"cap {cap} does not fit {budget_bytes} bytes next to κ_min of {layout.longest_request_blocks} KV blocks "
            f"within [{layout.min_cap}, {layout.num_experts}]; {largest}"
        )
    if cap is None:
        within_half = [c for c in possible if layout.experts_bytes_by_cap[c] <= budget_bytes // 2]
        cap = within_half[-1] if within_half else possible[0]
    return Split(cap=cap, kv_blocks=layout.kv_blocks_within(budget_bytes - layout.experts_bytes_by_cap[cap]))
