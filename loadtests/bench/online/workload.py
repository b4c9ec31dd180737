"""The work of an online run: tool-call bursts and long contexts, in turn or side by side.

Lengths are those of a 32,768-token context and shrink with it; pauses shrink by ``OnlineConfig.time_scale``. What each
kind wants was written down before any policy ran on it:

- **Bursts** have short prompts and write much for their length: their decode steps want experts, of several topics at
  once, and their contexts together take little KV.
- **Long contexts** come back again and again to a prompt that takes ten prefill passes, and write little: they want
  the KV of all sessions kept, and lose a whole refill of the context where it is not.
"""

from __future__ import annotations

from loadtests.traces import Agent, Phase

BURSTS = Agent(
    first_prompt_tokens=(500, 1500),
    added_tokens=(60, 300),
    output_tokens=(32, 96),
    turns=(6, 14),
    gap_s=(0.05, 0.4),
    burst_turns=(3, 8),
    pause_s=(3.0, 15.0),
)
LONG_CONTEXTS = Agent(
    first_prompt_tokens=(18000, 24000),
    added_tokens=(300, 1200),
    output_tokens=(12, 32),
    turns=(8, 16),
    gap_s=(5.0, 20.0),
    burst_turns=(1, 1),
    pause_s=(5.0, 20.0),
)

_BURST_PHASE = Phase(name="bursts", agents=((BURSTS, 20, "acme"),))
_LONG_PHASE = Phase(name="long contexts", agents=((LONG_CONTEXTS, 14, "globex"),), share=0.45)

PHASES: dict[str, tuple[Phase, ...]] = {
    "shifts": (_BURST_PHASE, _LONG_PHASE, _BURST_PHASE, _LONG_PHASE),
    "bursts": (_BURST_PHASE,),
    "long": (_LONG_PHASE,),
    "side_by_side": (Phase(name="both", agents=((BURSTS, 8, "acme"), (LONG_CONTEXTS, 6, "globex"))),),
}
"""By the name of `OnlineConfig.workflow`; all but the first are stationary."""
