"""What one engine costs: the constants of a replica in the simulator, all of which can be measured on a real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wisp_core.contracts import MemoryLayout, Split
from wisp_core.memory.initial_split import initial_split
from wisp_core.simulator.miss_curves import MissCurves


class DecodeStep(NamedTuple):
    """One decode step; misses and distinct experts of all layers together."""

    seconds: float
    link_s: float
    misses: float
    distinct: float


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """Sizes and costs of one replica.

    ::

        decode step  = step + rows · row + distinct experts · expert read + misses · expert_bytes / B · stretch
        prefill pass = compute(pass + tokens · token) and copies(misses · expert_bytes / B · stretch), the longer of
                       the two where they overlap, else their sum

    A prefill misses as many experts of a layer as the curves say for its tokens, and where passes of more than
    ``in_place_tokens`` stream what has no slot, all of that; unless ``pass_misses_by_cap`` says what was measured.
    """

    name: str
    layout: MemoryLayout
    budget_bytes: int
    """Both pools together."""
    link_bytes_per_s: float
    curves: MissCurves
    step_s: float
    row_s: float = 0.0
    distinct_s: float = 0.0
    """Of reading one expert of one layer from the device's own memory."""
    pass_s: float = 0.0
    token_s: float = 0.0
    pass_tokens: int = 2048
    """Most tokens of one pass (vLLM's max_num_batched_tokens)."""
    is_pass_overlapped: bool = True
    pass_misses_by_cap: tuple[float, ...] | None = None
    """Measured copies of one pass, all layers together; [E + 1]."""
    stretch: float = 1.0
    """Time of a decode step's copies in the engine over their time on the bare link."""
    pass_stretch: float | None = None
    """The same of a prefill pass; None: as in decode steps."""
    in_place_tokens: int | None = None
    """Passes of up to so many tokens read missing experts where they lie, as they need them; None: all do."""
    in_place_stretch: float | None = None
    """The stretch of those; None: of all passes."""
    starts_cold: bool = False
    """Slots are empty until the first decode step has filled them; False: taken to be filled before the first turn."""
    turn_s: float = 0.0
    """What a turn costs outside the engine: HTTP, placement, tokenization."""
    resize_s: float = 0.01
    """Pause of a resize, however small."""
    resize_s_per_byte: float = 5e-11
    _steps: dict[tuple[int, int, int], DecodeStep] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def copy_s(self) -> float:
        """Seconds of one missed expert of one layer."""
        return self.layout.expert_bytes / self.link_bytes_per_s * self.stretch

    def pass_copy_s(self, tokens: int) -> float:
        """The same where a prefill pass over ``tokens`` prompt tokens misses it."""
        stretch = self.stretch if self.pass_stretch is None else self.pass_stretch
        if self.in_place_stretch is not None and self._is_in_place(tokens):
            stretch = self.in_place_stretch
        return self.layout.expert_bytes / self.link_bytes_per_s * stretch

    def largest_split(self, cap: int) -> Split:
        """``cap`` with all KV that fits beside it."""
        rest_bytes = self.budget_bytes - self.layout.experts_bytes_by_cap[cap]
        return Split(cap=cap, kv_blocks=self.layout.kv_blocks_within(rest_bytes))

    def half_split(self) -> Split:
        """The largest cap within half of the budget, or what the longest request leaves room for, as engines start."""
        return initial_split(self.layout, budget_bytes=self.budget_bytes, cap=None)

    def decode_step(self, cap: int, batch: int, mix: int) -> DecodeStep:
        """A decode step of ``batch`` sessions, a mix of topics; remembered, since few of them differ."""
        step = self._steps.get((cap, batch, mix))
        if step is None:
            distinct = self.curves.distinct_experts(batch, mix)
            misses = self.curves.by_cap(batch, mix)[cap]
            compute_s = self.step_s + self.row_s * batch + self.distinct_s * distinct
            step = DecodeStep(compute_s + misses * self.copy_s, misses * self.copy_s, misses, distinct)
            self._steps[cap, batch, mix] = step
        return step

    def pass_misses(self, cap: int, tokens: int, by_topic: Mapping[int, int] | None = None) -> float:
        """Copies of one pass over ``tokens`` prompt tokens, all layers together; ``by_topic``: whose they are."""
        if self.pass_misses_by_cap is not None:
            return self.pass_misses_by_cap[cap]
        layout = self.layout
        if not self._is_in_place(tokens):
            return float(layout.num_layers * (layout.num_experts - cap))
        if by_topic is None:
            return layout.num_layers * self.curves.missed_by_prompt(tokens, cap, layout.top_k)
        return layout.num_layers * self.curves.missed_by_prompts(by_topic, cap, layout.top_k)

    def pass_compute_s(self, tokens: int) -> float:
        """Seconds of a pass without copies."""
        return self.pass_s + self.token_s * tokens

    def prefill_pass_s(self, tokens: int, misses: float) -> float:
        """Seconds of one pass over ``tokens`` prompt tokens with that many copies."""
        copies_s, compute_s = misses * self.pass_copy_s(tokens), self.pass_compute_s(tokens)
        return max(copies_s, compute_s) if self.is_pass_overlapped else copies_s + compute_s

    def first_token_s(self, cap: int, prompt_tokens: int) -> float:
        """Time to first token of a prompt alone on an idle engine, the turn's own overhead included."""
        whole, rest = divmod(prompt_tokens, self.pass_tokens)
        sizes = [self.pass_tokens] * whole + [rest] * (rest > 0)
        return self.turn_s + sum(self.prefill_pass_s(size, self.pass_misses(cap, size)) for size in sizes)

    def _is_in_place(self, tokens: int) -> bool:
        return self.in_place_tokens is None or tokens <= self.in_place_tokens
