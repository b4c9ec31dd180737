"""Which tenants take part in the next engine step: weighted shares of engine time, measured and not modelled.

Each tenant is promised to go on at least as fast as on an engine of its own that is slower by its share of the
weights. The unit is seconds of the engine, so tokens and bytes over the link count as what they cost. What a step of
one tenant alone would take is measured: steps in which only that tenant took part, one brought about now and then.
Batching makes shared steps cheaper than the sum of their parts, and that gain keeps everybody ahead of the promise
most of the time. Only when somebody falls behind it are those that are ahead and dear held out of steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

SLACK_S = 0.02
"""How far behind its promise a tenant counts as behind."""
MAX_AHEAD_S = 0.2
"""What a tenant that was ahead can be delayed by before it is behind, at most; about one step with a prompt in it."""
MAX_BEHIND_S = 1.0
"""What is made good, at most."""
BALANCE_HALF_LIFE_S = 10.0
"""Time after which half of what is owed is forgotten."""
REMEASURE_S = 5.0
"""Age at which what a tenant's step takes alone is measured again."""
STEPS_PER_TRIAL = 32
"""At most one step in so many is run to measure again."""
STEPS_PER_FIRST_TRIAL = 4
"""The same while a measure is missing."""
USE_HALF_LIFE_S = 10.0
"""Time after which engine seconds weigh half in the order of waiting turns."""
JOIN_S = 0.25
"""Waiting turns of tenants whose recent use differs by less than this start in one step."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one tenant computed in a step."""

    decode_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class _Tenant:
    """State of one tenant that has turns."""

    weight: float = 1.0
    ahead_s: float = 0.0
    """Engine seconds received beyond the promise; negative: behind it."""
    used_s: float = 0.0
    """Decayed engine seconds, per weight."""
    step_s: float = 0.0
    """Mean engine seconds of its part in a step."""
    decode_s: dict[int, float] = field(default_factory=dict)
    """A decode step of this tenant alone, by the magnitude of its batch."""
    measured_at_s: dict[int, float] = field(default_factory=dict)
    prefill_s_per_token: float | None = None
    decode_tokens: int = 0
    """Its batch in the last step."""


class FairShare:
    """Decides from what steps took. Knows no clock and no engine; times are on any one monotonic clock."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._last_step_s = 0.0
        self._steps_since_trial = 0
        self.is_trial = False
        """Whether the next step is to measure what one tenant's decode step takes alone: no prompt belongs in it."""

    def begin(self, tenant: str, weight: float) -> None:
        """``tenant`` has a turn more, of this weight; what it used and is owed from lately still counts."""
        self._tenants.setdefault(tenant, _Tenant()).weight = weight

    def used_s(self, tenant: str) -> float:
        """Engine seconds per weight that ``tenant`` used lately: waiting turns of the least go first."""
        state = self._tenants.get(tenant)
        return 0.0 if state is None else state.used_s

    def may_join(self, tenant: str, first: str) -> bool:
        """Whether waiting turns of ``tenant`` may start in the same step as those of ``first``, who used least."""
        return self.used_s(tenant) - self.used_s(first) < JOIN_S

    def held(self, active: Collection[str], now_s: float) -> frozenset[str]:
        """Tenants of ``active`` (those with running or waiting turns) that the next step goes without."""
        trial = self._trial(active, now_s) if len(active) > 1 else None
        self.is_trial = trial is not None
        if trial is not None:
            return frozenset(active) - {trial}
        states = {tenant: self._tenants[tenant] for tenant in active}
        if all(state.ahead_s >= -SLACK_S for state in states.values()):
            return frozenset()
        costs = {tenant: state.step_s / state.weight for tenant, state in states.items()}
        mean = sum(costs.values()) / len(costs)
        return frozenset(t for t, state in states.items() if state.ahead_s >= -SLACK_S and costs[t] >= mean)

    def _trial(self, active: Collection[str], now_s: float) -> str | None:
        """A tenant whose step alone has to be measured: it decodes now, and its measure is old."""
        ages_s = {
            tenant: now_s - state.measured_at_s.get(_magnitude(state.decode_tokens), -math.inf)
            for tenant in active
            if (state := self._tenants[tenant]).decode_tokens > 0
        }
        oldest = max(ages_s, key=ages_s.__getitem__, default=None)
        if oldest is None or ages_s[oldest] <= REMEASURE_S:
            return None
        if self._steps_since_trial < (STEPS_PER_TRIAL if math.isfinite(ages_s[oldest]) else STEPS_PER_FIRST_TRIAL):
            return None
        self._steps_since_trial = 0
        return oldest

    def note_step(
        self,
        parts: Mapping[str, StepPart],
        held: Collection[str],
        active: Collection[str],
        seconds: float,
        now_s: float,
    ) -> None:
        """A step with ``parts`` took ``seconds`` and ended at ``now_s``; ``held`` of ``active`` had no part in it."""
        self._decay(now_s)
        self._steps_since_trial += 1
        if len(parts) == 1:
            self._measure(*next(iter(parts.items())), seconds, now_s)
        total_weight = sum(self._tenants[tenant].weight for tenant in active) or 1.0
        for tenant in active:
            state = self._tenants[tenant]
            part = parts.get(tenant, StepPart())
            if tenant in parts:
                received_s, state.decode_tokens = self._alone_s(state, part, seconds), part.decode_tokens
                state.step_s += 0.1 * (received_s - state.step_s)
                state.used_s += received_s / state.weight
            elif tenant in held:
                received_s = 0.0
            else:
                # It had no work or no room, for which nobody else is to be held.
                state.ahead_s, state.decode_tokens = max(state.ahead_s, 0.0), 0
                continue
            ahead_s = state.ahead_s + received_s - seconds * state.weight / total_weight
            state.ahead_s = min(max(ahead_s, -MAX_BEHIND_S), MAX_AHEAD_S)

    def _measure(self, tenant: str, part: StepPart, seconds: float, now_s: float) -> None:
        """Learn from a step that had one tenant only."""
        state = self._tenants[tenant]
        if part.prefill_tokens > 0:
            state.prefill_s_per_token = _towards(state.prefill_s_per_token, seconds / part.prefill_tokens)
        else:
            magnitude = _magnitude(part.decode_tokens)
            state.decode_s[magnitude] = _towards(state.decode_s.get(magnitude), seconds)
            state.measured_at_s[magnitude] = now_s

    def _alone_s(self, state: _Tenant, part: StepPart, seconds: float) -> float:
        """What ``part`` alone would have taken; the whole step where that is not known."""
        if part.prefill_tokens > 0:
            per_token = state.prefill_s_per_token
            return seconds if per_token is None else min(seconds, per_token * part.prefill_tokens)
        return min(seconds, state.decode_s.get(_magnitude(part.decode_tokens), seconds))

    def _decay(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._last_step_s)
        self._last_step_s = now_s
        for state in self._tenants.values():
            state.used_s *= 0.5 ** (passed_s / USE_HALF_LIFE_S)
            state.ahead_s *= 0.5 ** (passed_s / BALANCE_HALF_LIFE_S)

    def forget_idle(self, active: Collection[str]) -> None:
        """Drop tenants without turns whose recent use no longer matters."""
        idle = [t for t, state in self._tenants.items() if t not in active and state.used_s < 1e-3]
        for tenant in idle:
            del self._tenants[tenant]


def _magnitude(num_tokens: int) -> int:
    """1, 2-3, 4-7, ... tokens: batches of one magnitude cost about the same."""
    return num_tokens.bit_length()


def _towards(known_s: float | None, seen_s: float) -> float:
    """Follow what is seen, down fast and up slowly: others' steps make one's own dearer, not cheaper."""
    if known_s is None:
        return seen_s
    return known_s + (0.5 if seen_s < known_s else 0.05) * (seen_s - known_s)
