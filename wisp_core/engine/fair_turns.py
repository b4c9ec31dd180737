"""Tenants in vLLM's scheduler: which turns the next step sees. The decisions are `FairShare`'s."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from wisp_core.contracts import blocks_of
from wisp_core.engine.fair_share import FairShare, StepPart
from wisp_core.engine.step_rows import extra_args, session_of

WEIGHT_ARG = "wisp_weight"
"""Key in ``SamplingParams.extra_args``: the tenant's share of engine time against other tenants' weights."""
KV_SHARE_ARG = "wisp_kv_share"
"""Key in ``SamplingParams.extra_args``: largest part of KV blocks and batch places for the tenant's running turns."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a turn runs. Turns without a session belong to the tenant ``""``."""

    tenant: str
    weight: float
    kv_share: float

    @classmethod
    def of(cls, request: Any) -> Terms:
        """The terms in a vLLM request's sampling parameters."""
        arguments = extra_args(request.sampling_params)
        return cls(
            tenant=session_of(request.sampling_params).partition("/")[0],
            weight=float(arguments.get(WEIGHT_ARG, 1.0)),
            kv_share=float(arguments.get(KV_SHARE_ARG, 1.0)),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """One step on its way through the worker."""

    parts: dict[str, StepPart]
    held: frozenset[str]
    active: frozenset[str]


class FairTurns:
    """Hides turns from one call of vLLM's ``schedule`` and accounts for what the step took.

    With turns of one tenant only, and no share below 1, it does nothing but count.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._share = FairShare()
        self._terms: dict[str, Terms] = {}
        self._num_turns: Counter[str] = Counter()
        self._num_bounded = 0
        """Turns of tenants with a share of KV and batch below all."""
        self._steps: deque[_Step] = deque()
        self._held: frozenset[str] = frozenset()
        self._is_stalled = False
        self._is_trial = False
        """Whether the step that is decided now measures what one tenant's decode step takes."""
        self._first: str | None = None
        """Whose prompts the step that is decided now is left to."""
        self._first_prompts: frozenset[str] = frozenset()
        self._passed_over: str | None = None
        """To whom the last step was left in vain: it computed none of these prompts, for want of blocks, say."""

    def add(self, request: Any) -> None:
        """A turn came."""
        terms = self._terms[request.request_id] = Terms.of(request)
        self._num_turns[terms.tenant] += 1
        self._num_bounded += terms.kv_share < 1.0
        self._share.begin(terms.tenant, terms.weight)

    def remove(self, request: Any) -> None:
        """A turn ended."""
        terms = self._terms.pop(request.request_id, None)
        if terms is not None:
            self._num_turns[terms.tenant] -= 1
            self._num_bounded -= terms.kv_share < 1.0
            if self._num_turns[terms.tenant] <= 0:
                del self._num_turns[terms.tenant]
                # A turn may be aborted while its step is computed; who took part is still to be told what it took.
                in_steps = frozenset[str]().union(*(step.active for step in self._steps))
                self._share.forget_idle(in_steps.union(self._num_turns))

    def hide(self) -> list[Any]:
        """Before ``schedule``: put running turns off by one step and take waiting turns out.

        Returns the turns taken out, for ``unhide``. What stays in the waiting queue is in the order of tenants by
        recent use, each tenant's own turns as they were.
        """
        scheduler, waiting = self._scheduler, self._scheduler.waiting
        self._held, self._is_trial, self._first, self._first_prompts = frozenset(), False, None, frozenset()
        if not isinstance(waiting, deque) or (len(self._num_turns) < 2 and self._num_bounded == 0):
            return []  # Another order than first come, first served was asked of vLLM; or there is nothing to share.
        admissible, refused = self._part(sorted(waiting, key=self._used_s))
        # A step for which nothing was left must not be followed by another: whoever is behind cannot run.
        if not self._is_stalled:
            self._held = self._share.held(self._num_turns.keys(), time.monotonic())
            self._is_trial = self._share.is_trial
            self._leave_to_first(admissible)
        if len(self._num_turns) > 1:
            # When blocks run out, vLLM takes those of the last one.
            scheduler.running.sort(key=self._used_s)
            for request in scheduler.running:
                if self._is_put_off(request):
                    # vLLM counts the step up before it compares.
                    request.next_decode_eligible_step = scheduler.current_step + 2
        if not waiting:
            return []
        waiting.clear()
        hidden: list[Any] = []
        for request in admissible:
            may_start = self._tenant(request) not in self._held and self._may_join(request)
            (waiting if may_start else hidden).append(request)
        return hidden + refused

    def _part(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        """Split the waiting turns into those that their tenant's share has room for and the others."""
        rooms = _Rooms(self._scheduler, self._terms)
        admissible: list[Any] = []
        refused: list[Any] = []
        for request in waiting:
            terms = self._terms[request.request_id]
            (admissible if terms.kv_share >= 1.0 or rooms.take(request, terms) else refused).append(request)
        return admissible, refused

    def _leave_to_first(self, admissible: list[Any]) -> None:
        """Leave the step to the prompts of the tenant that used least lately: those of nobody far above are computed.

        Only prompts that the step can compute count, or others would wait for nothing. What else keeps vLLM from
        taking one shows once a step was left to it in vain; then the next step is left to others. None of them gets its
        blocks: it stays at the head of the queue, which vLLM does not pass for want of blocks.
        """
        scheduler = self._scheduler
        prompts = [request for request in scheduler.running if request.is_prefill_chunk]
        if len(scheduler.running) < scheduler.max_num_running_reqs:
            prompts += [request for request in admissible if not _waits_for_grammar(request)]
        tenants = {self._tenant(request) for request in prompts} - self._held - {self._passed_over}
        self._first = min(tenants, key=self._share.used_s, default=None)
        self._first_prompts = frozenset(one.request_id for one in prompts if self._tenant(one) == self._first)

    def _is_put_off(self, request: Any) -> bool:
        return self._tenant(request) in self._held or (request.is_prefill_chunk and not self._may_join(request))

    def _may_join(self, request: Any) -> bool:
        """Whether a step may compute this turn's prompt."""
        if self._is_trial:
            return False
        return self._first is None or self._share.may_join(self._tenant(request), self._first)

    def unhide(self, hidden: list[Any], output: Any) -> None:
        """After ``schedule``: put back what ``hide`` took out, and remember whose step this is."""
        self._scheduler.waiting.extend(hidden)
        parts: dict[str, StepPart] = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            tenant = self._terms[request_id].tenant
            part = parts.get(tenant, StepPart())
            parts[tenant] = (
                StepPart(part.decode_tokens + 1, part.prefill_tokens)
                if num_tokens == 1
                else StepPart(part.decode_tokens, part.prefill_tokens + num_tokens)
            )
        self._is_stalled = not parts and bool(self._held or hidden)
        was_in_vain = not self._is_trial and self._first_prompts.isdisjoint(output.num_scheduled_tokens)
        self._passed_over = self._first if was_in_vain else None
        if parts:
            self._steps.append(_Step(parts, self._held, frozenset(self._num_turns)))

    def note_step(self, seconds: float) -> None:
        """The oldest step on its way has ended; it took ``seconds``."""
        step = self._steps.popleft()
        self._share.note_step(step.parts, step.held, step.active, seconds, time.monotonic())

    def _tenant(self, request: Any) -> str:
        return self._terms[request.request_id].tenant

    def _used_s(self, request: Any) -> float:
        return self._share.used_s(self._tenant(request))


def _waits_for_grammar(request: Any) -> bool:
    """Whether its grammar is still compiled, without which vLLM does not start it."""
    structured = request.structured_output_request
    return structured is not None and structured.grammar is None


class _Rooms:
    """KV blocks and batch places that tenants with a share below 1 may still take in this step."""

    def __init__(self, scheduler: Any, terms: dict[str, Terms]) -> None:
        self._scheduler = scheduler
        self._terms = terms
        self._blocks: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._full: set[str] = set()

    def take(self, request: Any, terms: Terms) -> bool:
        """Room for ``request`` in full; a tenant without a running turn always gets one, or it could never run.

        Behind a turn that finds no room none of its tenant's starts, or smaller ones would take its room for ever.
        """
        if terms.tenant in self._full:
            return False
        if terms.tenant not in self._blocks:
            self._count_running(terms.tenant)
        needed = self._needed_blocks(request)
        blocks, places = self._blocks[terms.tenant] + needed, self._places[terms.tenant] + 1
        pool = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        is_room = blocks <= terms.kv_share * pool and places <= terms.kv_share * self._scheduler.max_num_running_reqs
        if not is_room and self._places[terms.tenant] > 0:
            self._full.add(terms.tenant)
            return False
        self._blocks[terms.tenant], self._places[terms.tenant] = blocks, places
        return True

    def _count_running(self, tenant: str) -> None:
        running = [r for r in self._scheduler.running if self._terms[r.request_id].tenant == tenant]
        self._blocks[tenant] = sum(self._needed_blocks(request) for request in running)
        self._places[tenant] = len(running)

    def _needed_blocks(self, request: Any) -> int:
        longest = min(request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len)
        return blocks_of(longest, self._scheduler.block_size)
