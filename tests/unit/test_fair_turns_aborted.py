"""Turns come and go while steps are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wisp_core.engine.fair_turns import FairTurns


def turn(name: str, tenant: str, weight: float = 1.0) -> Any:
    sampling = SimpleNamespace(extra_args={"wisp_session": f"{tenant}/user/session", "wisp_weight": weight})
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


def test_a_new_weight_counts_from_the_next_turn_also_of_a_tenant_that_is_busy() -> None:
    turns = FairTurns(SimpleNamespace(waiting=[]))
    turns.add(turn("1", "acme"))
    turns.add(turn("2", "globex"))
    turns.add(turn("3", "acme", weight=4.0))
    turns.unhide([], step_of("1", "2"))
    turns.note_step()
    acme, globex = (turns._share.used_s(tenant) for tenant in ("acme", "globex"))
    assert acme == pytest.approx(globex / 4)
