"""Turns come and go while steps are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from wisp_core.engine.fair_turns import FairTurns


def turn(name: str, tenant: str) -> Any:
    sampling = SimpleNamespace(extra_args={"wisp_session": f"{tenant}/user/session"})
    return SimpleNamespace(request_id=name, sampling_params=sampling)


def step_of(*names: str) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


def test_a_tenant_whose_only_turn_is_aborted_while_its_step_is_computed_is_still_charged() -> None:
    turns = FairTurns(SimpleNamespace(waiting=[]))
    first = turn("1", "acme")
    turns.add(first)
    turns.unhide([], step_of("1"))
    turns.remove(first)
    turns.note_step()
    other = turn("2", "globex")
    turns.add(other)
    turns.unhide([], step_of("2"))
    turns.note_step()
    turns.remove(other)


def test_an_aborted_turn_of_two_tenants_leaves_the_others_step_to_be_told() -> None:
    turns = FairTurns(SimpleNamespace(waiting=[]))
    one, two = turn("1", "acme"), turn("2", "globex")
    turns.add(one)
    turns.add(two)
    turns.unhide([], step_of("1", "2"))
    turns.remove(one)
    turns.remove(two)
    turns.note_step()
