"""Working sets of sessions that begin with one system prompt: what a new session with it is expected to use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from wisp_core.contracts import Signature
from wisp_core.working_set.signature import merge

MAX_SESSIONS = 4096
MAX_GROUPS = 256
MAX_SESSIONS_PER_GROUP = 16
"""The ones that decoded last speak for their group."""


class PromptGroups:
    """Which prompt each session began with, and the last signatures of each prompt's sessions."""

    def __init__(self) -> None:
        self._prompt_of: OrderedDict[str, str] = OrderedDict()
        self._sessions: OrderedDict[str, OrderedDict[str, Signature]] = OrderedDict()

    def note(self, session_key: str, prompt_key: str) -> None:
        """A turn of a session came."""
        self._prompt_of[session_key] = prompt_key
        self._prompt_of.move_to_end(session_key)
        if len(self._prompt_of) > MAX_SESSIONS:
            self._prompt_of.popitem(last=False)

    def take_up(self, signatures: Iterable[Signature]) -> list[Signature]:
        """Take over sessions' new signatures; returns those of the prompts that they change."""
        changed: dict[str, OrderedDict[str, Signature]] = {}
        for signature in signatures:
            prompt_key = self._prompt_of.get(signature.key)
            if prompt_key is None or not signature.decode_tokens:
                continue
            group = changed[prompt_key] = self._sessions.setdefault(prompt_key, OrderedDict())
            self._sessions.move_to_end(prompt_key)
            # A prompt tells of the session that it begins, and of nothing else.
            group[signature.key] = signature.model_copy(update={"prefill_weights": b"", "prefill_tokens": 0})
            group.move_to_end(signature.key)
            if len(group) > MAX_SESSIONS_PER_GROUP:
                group.popitem(last=False)
        while len(self._sessions) > MAX_GROUPS:
            self._sessions.popitem(last=False)
        return [merge(prompt_key, group.values()) for prompt_key, group in changed.items()]
