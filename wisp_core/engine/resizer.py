"""One resize of a live engine: a revisioned, idempotent transaction over an `EngineControl`.

Order: the giver first. KV gives by *take* (scheduler) then *unmap* (worker); it gains by *map* (zero pages) then
*give*. Commands are carried out between two steps of the engine, which is held there: each would wait for a step of its
own otherwise. A long move goes in pieces, and the engine runs again once it was held as long as its last step took. A
command that fails has changed nothing, and those before it are undone in reverse. If the resizer itself
is stopped between two steps, groups stay out of the pool with their pages accounted: that loses blocks, never data,
and the next resize gives them back first.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from wisp_core.contracts import Barrier, Outcome, ResizeOutcome, Split, SplitPlan
from wisp_core.engine.control import CommandFailedError, DrainTimeoutError, EngineControl
from wisp_core.engine.reports import LayoutReport, MemoryReport, SchedulerReport
from wisp_core.errors import CapacityError, EngineUnavailableError, IntegrityError
from wisp_core.memory.resize_plan import Move, Refusal, Step, plan_moves, steps_of

_STEP_BYTES = 512 << 20
"""Moved by one command: some 20 ms on a GPU."""

_FINAL = (Outcome.APPLIED, Outcome.FAILED)

Undo = Callable[[], Awaitable[None]]


class _DeferredError(Exception):
    """The resize is not possible now; nothing was changed."""


class _Hold:
    """Keeps the engine between two steps, for about as long as it took to get there: the rest of a step."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self._since_s = self._enough_s = self._before_s = 0.0

    @property
    def seconds(self) -> float:
        """For how long so far."""
        return self._before_s + time.perf_counter() - self._since_s

    async def __aenter__(self) -> _Hold:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._control.resume()

    async def let_run(self) -> None:
        """Let the engine do a step where it was held for so long."""
        if time.perf_counter() >= self._enough_s:
            await self._control.resume()
            self._before_s = self.seconds
            await self._begin()

    async def _begin(self) -> None:
        asked_s = time.perf_counter()
        try:
            await self._control.hold()
        except BaseException:  # an engine that may be held all the same must not stay so
            await self._control.resume()
            raise
        self._since_s = time.perf_counter()
        self._enough_s = 2 * self._since_s - asked_s


class Resizer:
    """Applies plans to one incarnation of one engine, one at a time."""

    def __init__(
        self,
        control: EngineControl,
        facts: LayoutReport,
        *,
        replica_id: str,
        incarnation: str,
        drain_timeout_s: float,
        step_bytes: int = _STEP_BYTES,
    ) -> None:
        self._control = control
        self._facts = facts
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._drain_timeout_s = drain_timeout_s
        self._step_bytes = step_bytes
        self._in_progress: int | None = None
        self._is_draining = False
        self._handled: dict[int, ResizeOutcome] = {}
        self._last_revision = 0
        self.split = Split(cap=0, kv_blocks=0)

    @property
    def is_resizing(self) -> bool:
        """Whether a resize is in progress."""
        return self._in_progress is not None

    @property
    def is_draining(self) -> bool:
        """Whether a resize waits for running turns to end: new ones should go elsewhere."""
        return self._is_draining

    @property
    def plan_revision(self) -> int:
        """Revision of the last plan that was handled."""
        return self._last_revision

    async def start(self, target: Split) -> None:
        """Give a fresh engine its first split, before it serves. Raises CapacityError when that is not possible."""
        await self._control.configure(self._facts.layout.kv_group_blocks)
        await self._control.deflate()
        scheduler, memory = await self._reports()
        before = Split(cap=memory.cap, kv_blocks=scheduler.usable_blocks)
        moves = self._plan(before, target, floor_blocks=self._facts.layout.longest_request_blocks)
        if isinstance(moves, Refusal):
            raise CapacityError(f"initial split cap={target.cap} kv_blocks={target.kv_blocks}: {moves.reason}")
        await self._act(moves, list(scheduler.taken_groups))
        await self._refresh_split()

    async def resize(self, plan: SplitPlan) -> ResizeOutcome:
        """Put ``plan`` into effect or say why not.

        A revision that was applied or has failed is answered again without effect; one that was deferred, or met
        another resize, is tried anew. Where turns leave too few KV groups free, as many slots are applied as those pay
        for; ``after`` says how many, and the rest is for a later plan.
        """
        if plan.incarnation != self._incarnation:
            reason = f"the plan is for incarnation {plan.incarnation}, this is {self._incarnation}"
            return self._outcome(plan, Outcome.STALE, reason)
        if plan.revision in self._handled:
            return self._handled[plan.revision]
        if plan.revision < self._last_revision:
            reason = f"revision {plan.revision} is older than {self._last_revision}, which was handled"
            return self._outcome(plan, Outcome.STALE, reason)
        if self._in_progress is not None:
            return self._outcome(plan, Outcome.CONFLICT, f"revision {self._in_progress} is in progress")
        self._in_progress = plan.revision
        self._is_draining = plan.barrier is Barrier.DRAINED
        try:
            outcome = await self._carry_out(plan)
        finally:
            self._in_progress = None
            self._is_draining = False
        self._last_revision = plan.revision
        self._handled = {plan.revision: outcome} if outcome.outcome in _FINAL else {}
        return outcome

    async def _carry_out(self, plan: SplitPlan) -> ResizeOutcome:
        try:
            if plan.barrier is Barrier.DRAINED:
                return await self._apply(plan, None)
            async with _Hold(self._control) as hold:
                return await self._apply(plan, hold)
        except _DeferredError as error:
            return self._outcome(plan, Outcome.DEFERRED, str(error))
        except (CommandFailedError, EngineUnavailableError, IntegrityError) as error:
            await self._refresh_split()
            return self._outcome(plan, Outcome.FAILED, str(error))

    async def _apply(self, plan: SplitPlan, hold: _Hold | None) -> ResizeOutcome:
        scheduler, memory = await self._reconciled()
        before = self.split = Split(cap=memory.cap, kv_blocks=scheduler.usable_blocks)
        # After a drain nothing runs, and the take itself checks the floor of whatever does.
        floor_blocks = self._facts.layout.longest_request_blocks if hold is None else scheduler.kv.floor_blocks
        moves = self._plan(before, plan.split, floor_blocks)
        if isinstance(moves, Refusal):
            return self._outcome(plan, moves.outcome, moves.reason)
        if moves[0].is_hold:
            return self._outcome(plan, Outcome.APPLIED, "hold: the engine is at this split")
        taken = list(scheduler.taken_groups)
        if hold is None:
            move, pause_s = await self._act_drained(moves, taken)
        else:
            move, pause_s = await self._act(moves, taken, hold), hold.seconds
        scheduler, memory = await self._reports()
        self.split = Split(cap=memory.cap, kv_blocks=scheduler.usable_blocks)
        reason = _describe(before, self.split)
        if move.cap_after != plan.split.cap:
            reason += f"; cap {plan.split.cap} needs more KV groups than turns leave free"
        outcome = self._outcome(plan, Outcome.APPLIED, reason)
        return outcome.model_copy(update={"before": before, "bytes_moved": move.bytes_moved, "pause_ms": pause_s * 1e3})

    def _plan(self, before: Split, target: Split, floor_blocks: int) -> list[Move] | Refusal:
        return plan_moves(
            self._facts.layout,
            budget_bytes=self._facts.budget_bytes,
            before=before,
            target=target,
            floor_blocks=floor_blocks,
        )

    async def _act_drained(self, moves: list[Move], taken: list[int]) -> tuple[Move, float]:
        """`_act` while nothing runs; also returns the time from the drained state to the end, in seconds."""
        try:
            try:
                await self._control.drain(self._drain_timeout_s)
            except DrainTimeoutError as error:
                raise _DeferredError(f"barrier drained: {error}") from error
            started_s = time.perf_counter()
            move = await self._act(moves, taken)
            return move, time.perf_counter() - started_s
        finally:
            await self._control.resume()

    async def _act(self, moves: list[Move], taken: list[int], hold: _Hold | None = None) -> Move:
        """Make the first of ``moves`` for which there are groups, and return it."""
        budget_bytes, layout = self._facts.budget_bytes, self._facts.layout
        undos: list[Undo] = []
        try:
            move, leaving = await self._take(moves, undos)
            coming = taken[: max(0, move.groups_after - move.groups_before)]
            cap, num_mapped = move.cap_before, 0
            steps = steps_of(move, layout, budget_bytes=budget_bytes, step_bytes=self._step_bytes)
            for index, step in enumerate(steps):
                if index and hold is not None:
                    await hold.let_run()
                await self._act_step(step, cap, leaving, coming[num_mapped:], undos)
                leaving, cap, num_mapped = leaving[step.num_unmapped :], step.cap, num_mapped + step.num_mapped
            if coming:
                await self._control.give_groups(coming)
        except CommandFailedError as error:
            raise CommandFailedError(f"{error}; {await _roll_back(undos)}") from error
        return move

    async def _take(self, moves: list[Move], undos: list[Undo]) -> tuple[Move, list[int]]:
        """Take groups out of vLLM's pool for the first of ``moves`` for which that is possible."""
        if not moves[0].num_leaving:
            return moves[0], []
        counts = [move.num_leaving for move in moves]
        take = await self._control.take_groups(counts)
        groups = list(take.groups)
        if not groups:
            raise _DeferredError(
                f"{counts[0]} KV groups asked for, {counts[-1]} at the least, {take.available_groups} are free; turns "
                f"that run need {take.floor_blocks} of the {take.usable_blocks} blocks"
            )
        undos.append(lambda: self._control.give_groups(groups))
        return moves[counts.index(len(groups))], groups

    async def _act_step(
        self, step: Step, cap_before: int, leaving: list[int], coming: list[int], undos: list[Undo]
    ) -> None:
        if unmapped := leaving[: step.num_unmapped]:
            await self._control.unmap_groups(unmapped)
            undos.append(lambda: self._control.map_groups(unmapped))
        if step.cap != cap_before:
            await self._control.set_cap(step.cap)
            undos.append(lambda: self._control.set_cap(cap_before))
        if mapped := coming[: step.num_mapped]:
            await self._control.map_groups(mapped)
            undos.append(lambda: self._control.unmap_groups(mapped))

    async def _reconciled(self) -> tuple[SchedulerReport, MemoryReport]:
        """Reports after giving back what a stopped resize has left out of the pool."""
        scheduler, memory = await self._reports()
        taken, backed = set(scheduler.taken_groups), set(memory.kv_groups)
        num_groups = self._facts.layout.groups_for_blocks(self._facts.layout.max_kv_blocks)
        if missing := set(range(num_groups)) - taken - backed:
            raise IntegrityError(f"KV groups in vLLM's pool without pages: {sorted(missing)}")
        if leaked := sorted(taken & backed):
            await self._control.give_groups(leaked)
            scheduler, memory = await self._reports()
        return scheduler, memory

    async def _reports(self) -> tuple[SchedulerReport, MemoryReport]:
        return await self._control.pool_reports()

    async def _refresh_split(self) -> None:
        """Read the split back; keeps the last known one when the engine does not tell."""
        with suppress(CommandFailedError, EngineUnavailableError):
            scheduler, memory = await self._reports()
            self.split = Split(cap=memory.cap, kv_blocks=scheduler.usable_blocks)

    def _outcome(self, plan: SplitPlan, outcome: Outcome, reason: str) -> ResizeOutcome:
        return ResizeOutcome(
            replica_id=self._replica_id,
            revision=plan.revision,
            outcome=outcome,
            reason=reason,
            before=self.split,
            after=self.split,
            policy=plan.policy,
            plan_reason=plan.reason,
        )


async def _roll_back(undos: list[Undo]) -> str:
    """Undo in reverse; says how that went. Stops at the first failure, since later undos build on it."""
    for undo in reversed(undos):
        try:
            await undo()
        except CommandFailedError as error:
            return f"roll-back failed too, the next resize reconciles: {error}"
    return "rolled back" if undos else "nothing was changed"


def _describe(before: Split, after: Split) -> str:
    return f"cap {before.cap} -> {after.cap}, KV blocks {before.kv_blocks} -> {after.kv_blocks}"
