"""What a turn costs on a replica, as far as it does not depend on whose turn it is: derived from figures.

A decode step of n turns takes ``fixed + n · row`` seconds of compute and copies the experts of their union that have
no slot. A turn of T tokens that joins them takes T such steps itself, and makes each of theirs longer; both count,
as a replica that serves one turn at the cost of ten others is no good choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wisp_core.routing.views import RoutingWeights

Column = npt.NDArray[np.float64]
"""One number per replica, [N]."""


@dataclass(frozen=True, eq=False)
class Load:
    """Per replica, each [N]. ``_s`` are seconds of the turn and of what it delays, per unit of the turn."""

    turns: Column
    """Turns expected beside it."""
    token_s: Column
    """Compute per output token."""
    copies_s: Column
    """Expert copies of the turns that are there, per output token."""
    use_s: Column
    """Per output token and use of an expert without a slot."""
    pass_s: Column
    """Of a prefill pass that needs every expert."""
    max_pass_tokens: Column
    whole_pass: Column
    """Part of the experts that a pass of that many tokens needs."""
    use_share: Column
    """Part of a layer's experts that one token uses."""
    prompt_token_s: Column
    """Per prompt token, passes apart."""
    queue: Column
    """Mean turns until one of ``max_num_seqs`` places is free."""
    waits: Column
    """Turns that want blocks, this one included."""
    free_tokens: Column
    kv_tokens: Column
    resize_s: Column
    """Per turn."""


def expected_turns(turns: Column, mean_turns: Column) -> Column:
    """Turns in the course of a turn: half what runs now, half what has run there lately.

    Sessions return, so a replica that is idle at this moment may not stay so; and a burst passes.
    """
    expected: Column = (turns + np.maximum(mean_turns, 0.0)) / 2
    return expected


def needed_share(tokens: Column, use_share: Column) -> Column:
    """Part of the experts that a pass over so many tokens needs, had each token's been drawn anew."""
    share: Column = -np.expm1(-tokens * use_share)
    return share


def load_of(figures: Mapping[str, Column], weights: RoutingWeights, *, absent_sessions: float = 0.0) -> Load:
    """Derive the loads of replicas.

    Args:
        figures: Columns by the names of `ReplicaFigures`, nothing unmeasured in them, and ``placed``, ``copies``.
        weights: Constants.
        absent_sessions: Sessions to leave out of what has run there lately: the one that asks, at its home.
    """
    usual = figures["mean_turns"] + figures["placed"] - absent_sessions
    turns = expected_turns(figures["turns"], usual)
    # Prefills of others stop every decode step.
    pace = 1.0 / (1.0 - figures["prefill_share"])
    places = np.maximum(figures["max_num_seqs"], 1.0)
    together = 1.0 + turns
    use_share = np.where(figures["use_share"] > 0, figures["use_share"], 1.0)
    max_pass_tokens = np.maximum(figures["max_pass_tokens"], 1.0)
    return Load(
        turns=turns,
        token_s=pace * (figures["fixed_s"] + figures["row_s"] * (together + turns)),
        copies_s=figures["copy_s"] * figures["copies"],
        use_s=figures["copy_s"] * together,
        pass_s=figures["pass_s"] / needed_share(np.maximum(figures["pass_tokens"], 1.0), use_share) * together,
        max_pass_tokens=max_pass_tokens,
        whole_pass=needed_share(max_pass_tokens, use_share),
        use_share=use_share,
        prompt_token_s=figures["prompt_token_s"] * together,
        queue=np.maximum(figures["turns"] + 1.0 - places, 0.0) / places,
        waits=1.0 + figures["waiting_turns"],
        free_tokens=figures["free_blocks"] * figures["block_tokens"],
        kv_tokens=figures["kv_blocks"] * figures["block_tokens"],
        resize_s=figures["is_resizing"] * weights.resize_s,
    )
