"""Signatures by who wrote them: a user's or tenant's sessions run on several replicas, and each knows its own only.

Each replica keeps its part under the key, so that none overwrites another's; a reader gets their sum. The parts of a
key are bounded: the ones written last speak for a key that more replicas serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import ValidationError

from wisp_core.contracts import Signature
from wisp_core.working_set.signature import merge

MAX_PARTS = 4
"""Replicas whose parts of one key are kept."""


def to_text(part: Signature) -> str:
    """A part as it is stored: its time in seconds in front, which scripts read."""
    return f"{part.at_s:.3f} {part.model_dump_json()}"


def from_texts(texts: Iterable[str], oldest_s: float) -> Signature | None:
    """The sum of the stored parts of one key, those from before ``oldest_s`` and of other schemas left out."""
    parts = [part for text in texts if (part := _part(text)) is not None and part.at_s >= oldest_s]
    return total(parts) if parts else None


def total(parts: Sequence[Signature]) -> Signature:
    """The sum of one key's parts, of those that have the shape of the newest: a key may outlive a model."""
    newest = max(parts, key=lambda part: part.at_s)
    shape = (newest.num_layers, newest.num_experts)
    alike = [part for part in parts if (part.num_layers, part.num_experts) == shape]
    if len(alike) == 1:
        return newest
    try:
        return merge(newest.key, alike).model_copy(update={"at_s": newest.at_s})
    except ValueError:  # one of them does not hold what it says
        return newest


def _part(text: str) -> Signature | None:
    try:
        return Signature.model_validate_json(text.partition(" ")[2])
    except ValidationError:
        return None
