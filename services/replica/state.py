"""What the tasks of one replica share: the engine, the store, the metrics and whether the engine serves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.replica.metrics import ReplicaMetrics
from services.replica.prompt_groups import PromptGroups
from wisp_core.contracts import ReplicaSnapshot
from wisp_core.store.interface import ReplicaStore

if TYPE_CHECKING:
    from wisp_core.engine.engine import WispEngine


@dataclass
class ReplicaState:
    """Belongs to one event loop."""

    replica_id: str
    engine: WispEngine
    store: ReplicaStore
    metrics: ReplicaMetrics
    last_snapshot: ReplicaSnapshot | None = None
    prompt_groups: PromptGroups = field(default_factory=PromptGroups)
    engine_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the present engine is known to be dead or hung; a restart puts a new event here."""

    report_soon: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something happens that routers should know before the next report is due."""

    @property
    def can_serve(self) -> bool:
        """Whether the present engine answers, as far as is known."""
        return not self.engine_ended.is_set() and not self.engine.is_dead
