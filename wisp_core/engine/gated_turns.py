"""The turn gate in vLLM's scheduler: takes turns that may not start yet out of one call of ``schedule``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from wisp_core.contracts import Signature
from wisp_core.engine.step_rows import session_of
from wisp_core.engine.turn_gate import TurnGate, WaitingTurn
from wisp_core.working_set.predictor import core_masks
from wisp_core.working_set.signature import unpack

CORE_SHARE = 0.8
"""Part of a session's uses whose experts count as its working set."""
CORE_LAYERS = 8
"""Layers that are looked at."""
MIN_DECODE_TOKENS = 16
"""Sessions that have decoded less are not known well enough to be held."""


def expected_masks(signatures: Iterable[Signature]) -> dict[str, list[str]]:
    """What the command ``expect`` takes, of the sessions among ``signatures``."""
    return {
        signature.key: [f"{mask:x}" for mask in core_masks(unpack(signature), CORE_SHARE, CORE_LAYERS)]
        for signature in signatures
        if signature.key.count("/") >= 2 and signature.decode_tokens >= MIN_DECODE_TOKENS
    }


class GatedTurns:
    """Between a vLLM scheduler and a `TurnGate`."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._gate = TurnGate()
        self._started_s: dict[str, float] = {}  # of running turns

    def learn(self, cap: int, masks: dict[str, list[str]]) -> None:
        """Command ``expect``: slots per layer and hexadecimal masks by session, see `TurnGate.learn`."""
        self._gate.learn(cap, {session: [int(mask, 16) for mask in layers] for session, layers in masks.items()})

    def hold(self) -> list[Any]:
        """Before ``schedule``: take out the turns that may not start; ``release`` puts them back."""
        scheduler, waiting = self._scheduler, self._scheduler.waiting
        if self._gate.is_open or not isinstance(waiting, FCFSRequestQueue):
            return []
        self._note_running()
        if not waiting:
            return []
        # Preempted turns have started once, and hold up nobody's first token.
        fresh = [request for request in waiting if request.status == RequestStatus.WAITING]
        now_s = time.time()
        decisions = self._gate.may_start(
            [session_of(request.sampling_params) for request in scheduler.running],
            [WaitingTurn(session_of(request.sampling_params), now_s - request.arrival_time) for request in fresh],
            time.monotonic(),
        )
        held = [request for request, may in zip(fresh, decisions, strict=True) if not may]
        if held:
            waiting.remove_requests(held)
        return held

    def _note_running(self) -> None:
        """Tell the gate how long the turns ran that have ended."""
        now_s, scheduler = time.monotonic(), self._scheduler
        for request_id in self._started_s.keys() - scheduler.requests.keys():
            self._gate.note_turn(now_s - self._started_s.pop(request_id))
        for request in scheduler.running:
            self._started_s.setdefault(request.request_id, now_s)

    def release(self, held: list[Any]) -> None:
        """After ``schedule``: put back what ``hold`` took out, in order of arrival."""
        if held:
            waiting = self._scheduler.waiting
            rest = [request for request in waiting if request.status == RequestStatus.WAITING]
            first = [request for request in waiting if request.status != RequestStatus.WAITING]
            waiting.clear()
            waiting.extend([*first, *sorted([*rest, *held], key=lambda request: request.arrival_time)])

    def note_step(self, output: Any, seconds: float) -> None:
        """The step that ``schedule`` decided as ``output`` has ended; it took ``seconds``."""
        if output.total_num_scheduled_tokens > len(output.num_scheduled_tokens):
            self._gate.note_pass(seconds, time.monotonic())
