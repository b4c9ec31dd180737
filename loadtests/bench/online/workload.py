"""The work of an online run: tool-call bursts and long contexts, in turn or side by side.

Lengths are those of a 32,768-token context and shrink with it; pauses shrink with a scale of their own, as turns of the
tiny model are shorter too. What each kind wants was written down before any policy ran on it:

- **Bursts** have short prompts and write much for their length: their decode steps want experts, of several topics at
  once, and their contexts together take little KV.
- **Long contexts** come back again and again to a prompt that takes ten prefill passes, and write little: they want
  the KV of all sessions kept, and lose a whole refill of the context where it is not.

The short form has few of both, for a GPU that is lent by the minute: each long context takes seven passes of 4,096
tokens, and all of them together just fit beside a tenth of the experts of a 30B model in 24 GB.
"""

from __future__ import annotations

from loadtests.traces import Agent, Phase, Workload, generate
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.trace import Trace

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
FEW_BURSTS = Agent(
    first_prompt_tokens=(300, 800),
    added_tokens=(40, 150),
    output_tokens=(48, 128),
    turns=(8, 16),
    gap_s=(0.05, 0.3),
    burst_turns=(3, 8),
    pause_s=(0.3, 1.0),
)
FEW_LONG_CONTEXTS = Agent(
    first_prompt_tokens=(24000, 28000),
    added_tokens=(100, 400),
    output_tokens=(6, 16),
    turns=(20, 20),
    gap_s=(1.0, 3.0),
    burst_turns=(1, 1),
    pause_s=(1.0, 3.0),
)

_BURST_PHASE = Phase(name="bursts", agents=((BURSTS, 20, "acme"),))
_LONG_PHASE = Phase(name="long contexts", agents=((LONG_CONTEXTS, 14, "globex"),), share=0.45)
_FEW_BURSTS_PHASE = Phase(name="bursts", agents=((FEW_BURSTS, 4, "acme"),))
_FEW_LONG_PHASE = Phase(name="long contexts", agents=((FEW_LONG_CONTEXTS, 5, "globex"),), share=2.4)

PHASES: dict[str, tuple[Phase, ...]] = {
    "shifts": (_BURST_PHASE, _LONG_PHASE, _BURST_PHASE, _LONG_PHASE),
    "bursts": (_BURST_PHASE,),
    "long": (_LONG_PHASE,),
    "side_by_side": (Phase(name="both", agents=((BURSTS, 8, "acme"), (LONG_CONTEXTS, 6, "globex"))),),
    "short": (_FEW_BURSTS_PHASE, _FEW_LONG_PHASE, _FEW_BURSTS_PHASE),
}
"""By the name of a configuration's ``workflow``; `shifts` and `short` have phases, the others are stationary."""


def fixed_turns(
    workflow: str, *, num_turns: int, seed: int, max_context_tokens: int, time_scale: float, num_topics: int
) -> Trace:
    """The turns that every way plays. Raises ConfigurationError for an unknown workflow."""
    if workflow not in PHASES:
        raise ConfigurationError(f"--workflow {workflow}: it is one of {', '.join(PHASES)}")
    workload = Workload(
        name=workflow,
        phases=PHASES[workflow],
        num_turns=num_turns,
        max_context_tokens=max_context_tokens,
        time_scale=time_scale,
        num_topics=num_topics,
    )
    return generate(workload, seed=seed)
