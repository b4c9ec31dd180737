"""The pager of this process, for whoever has no reference to a layer (worker RPC, tests)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wisp_core.pager.interface import ExpertPager

_current: weakref.ref[ExpertPager] | None = None


def current_pager() -> ExpertPager | None:
    """The pager of the engine built last in this process, while it lives; None without a paged engine."""
    return _current() if _current is not None else None


def set_current_pager(pager: ExpertPager) -> None:
    """Make ``pager`` the current one; the model's layers keep it alive, this does not."""
    global _current
    _current = weakref.ref(pager)
