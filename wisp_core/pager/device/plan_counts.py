"""What a plan writes down for later: sums over steps, uses by stack position, and who asked for what.

Nothing here may delay the step: all of it is stored or added without waiting for an answer.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from wisp_core.pager.device.state import COUNTS_WIDTH, ROUTED_MISS

_ROUTED_MISS = tl.constexpr(ROUTED_MISS)
_COUNTS_WIDTH = tl.constexpr(COUNTS_WIDTH)


@triton.jit
def keep_routed(routed_ptr, num_ids, ids, is_real, is_missing, ids_at_once: tl.constexpr):
    """Keep the first ids for `wisp_core.pager.device.uses`."""
    at = tl.arange(0, ids_at_once)
    kept = ids + tl.gather(is_missing.to(tl.int32), ids, 0) * _ROUTED_MISS
    tl.store(routed_ptr + at, tl.where(is_real, kept, -1).to(tl.int16), mask=at < num_ids)


@triton.jit
def add_counts(counts_ptr, num_rows, num_needed, num_hits, num_misses, num_copies):
    """Add one step to the sums, in the order of `StepCounts`. Atomic only because that does not wait for a load."""
    at = tl.arange(0, _COUNTS_WIDTH)
    step = (at == 0).to(tl.int64)
    step += tl.where(at == 1, num_rows, 0)
    step += tl.where(at == 2, num_needed, 0)
    step += tl.where(at == 3, num_hits, 0)
    step += tl.where(at == 4, num_misses, 0)
    step += tl.where(at == 5, num_misses - num_copies, 0)
    tl.atomic_add(counts_ptr + at, step, sem="relaxed")


@triton.jit
def add_distances(distances_ptr, needed, position, num_seen, num_experts: tl.constexpr):
    """Count each use at its expert's place in the stack, first uses at the end."""
    place = tl.where(position >= num_seen, num_experts, position)
    tl.atomic_add(distances_ptr + place, needed.to(tl.int64), mask=needed != 0, sem="relaxed")
