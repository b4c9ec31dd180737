"""Sessions that begin with one system prompt share a signature, and nobody learns the prompt from its key."""

from __future__ import annotations

import numpy as np
import pytest

from services.ingress.sessions import prompt_key
from services.replica import prompt_groups
from services.replica.prompt_groups import PromptGroups
from wisp_core.contracts import Signature
from wisp_core.working_set.signature import merge, pack, unpack

SYSTEM = {"role": "system", "content": "You are a pirate."}


def chat(*messages: dict[str, str], **fields: object) -> dict[str, object]:
    return {"messages": list(messages), **fields}


def signature(key: str, tokens: int, *counts: float) -> Signature:
    return Signature(
        key=key,
        num_layers=1,
        num_experts=len(counts),
        weights=pack(np.array([counts])),
        decode_tokens=tokens,
        lookups=2,
    )


def test_chats_with_one_system_prompt_have_one_key() -> None:
    key = prompt_key("secret", "acme", chat(SYSTEM, {"role": "user", "content": "a"}))
    assert key.startswith("acme/@")
    assert prompt_key("secret", "acme", chat(SYSTEM, {"role": "user", "content": "b"})) == key
    others = [
        prompt_key("secret", "globex", chat(SYSTEM)),
        prompt_key("other", "acme", chat(SYSTEM)),
        prompt_key("secret", "acme", chat({"role": "system", "content": "You are a parrot."})),
        prompt_key("secret", "acme", chat(SYSTEM, tools=[{"type": "function"}])),
    ]
    assert len({key, *others}) == 5
    assert "pirate" not in key


@pytest.mark.parametrize("body", [{}, {"prompt": "x"}, chat(), chat({"role": "user", "content": "a"}, SYSTEM)])
def test_without_a_system_prompt_there_is_no_key(body: dict[str, object]) -> None:
    assert prompt_key("secret", "acme", body) == ""


def test_a_merged_signature_weighs_sessions_by_their_tokens() -> None:
    merged = merge("k", [signature("a", 30, 1, 0, 0), signature("b", 10, 0, 1, 1)])
    assert unpack(merged) == pytest.approx(np.array([[1, 5 / 30, 5 / 30]]), abs=0.01)
    assert (merged.key, merged.decode_tokens, merged.lookups) == ("k", 40, 4)
    with pytest.raises(ValueError, match="2 signatures of 2 shapes"):
        merge("k", [signature("a", 1, 1, 0), signature("b", 1, 1, 0, 0)])
    with pytest.raises(ValueError, match="0 signatures"):
        merge("k", [])


def test_a_group_changes_with_its_sessions_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_groups, "MAX_SESSIONS_PER_GROUP", 2)
    groups = PromptGroups()
    for name in "abc":
        groups.note(name, "t/@1")
    (first,) = groups.take_up([signature("a", 5, 1, 0), signature("stranger", 5, 1, 0), signature("t", 9, 1, 1)])
    assert (first.key, first.decode_tokens) == ("t/@1", 5)
    (both,) = groups.take_up([signature("b", 7, 0, 1)])
    assert both.decode_tokens == 12
    (last,) = groups.take_up([signature("c", 1, 0, 1), signature("b", 8, 0, 1)])
    assert last.decode_tokens == 9
    assert groups.take_up([signature("stranger", 5, 1, 0)]) == []
