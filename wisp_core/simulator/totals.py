"""What a simulated replica has done since the start, summed up."""

from __future__ import annotations

from wisp_core.simulator.engine_model import DecodeStep


class Totals:
    """What a replica has done since the start."""

    __slots__ = (
        "_turns_since_s",
        "comeback_misses",
        "decode_distinct",
        "decode_link_s",
        "decode_misses",
        "decode_s",
        "decode_steps",
        "decode_tokens",
        "decode_tokens_in_passes",
        "hit_tokens",
        "pass_link_s",
        "pass_misses",
        "pass_s",
        "pass_tokens",
        "passes",
        "prompt_passes",
        "prompt_tokens",
        "stall_s",
        "turn_seconds",
    )

    def __init__(self) -> None:
        self.decode_steps = self.decode_tokens = self.decode_misses = self.decode_distinct = 0.0
        self.decode_s = self.decode_link_s = self.comeback_misses = self.stall_s = 0.0
        self.passes = self.pass_tokens = self.decode_tokens_in_passes = 0
        self.pass_misses = self.pass_s = self.pass_link_s = 0.0
        self.prompt_tokens = self.prompt_passes = self.hit_tokens = 0
        self.turn_seconds = self._turns_since_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds with a step running."""
        return self.decode_s + self.pass_s + self.stall_s

    def add_decode(self, steps: float, batch: int, step: DecodeStep) -> None:
        """Count ``steps`` like ``step``."""
        self.decode_steps += steps
        self.decode_tokens += steps * batch
        self.decode_misses += steps * step.misses
        self.decode_distinct += steps * step.distinct
        self.decode_s += steps * step.seconds
        self.decode_link_s += steps * step.link_s

    def add_pass(self, tokens: int, misses: float, link_s: float, seconds: float) -> None:
        """Count a pass."""
        self.passes += 1
        self.pass_tokens += tokens
        self.pass_misses += misses
        self.pass_link_s += link_s
        self.pass_s += seconds

    def observe_turns(self, now_s: float, num_turns: int) -> None:
        """``num_turns`` were there since the last call."""
        self.turn_seconds += (now_s - self._turns_since_s) * num_turns
        self._turns_since_s = now_s
