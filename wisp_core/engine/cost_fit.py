"""Fits the engine's compute time to its own steps: seconds per step and per token, decode and prefill apart."""

from __future__ import annotations

from typing import NamedTuple

from wisp_core.contracts import CostFit, PagerCounts
from wisp_core.working_set.forgetting import Forgetting

_LEAST_STEPS = 16
"""An interval with fewer steps says more about where it was cut than about a step: counters of forwards and of steps
are read while a step runs, and one of a second may lie in the one and not yet in the other."""
_RIDGE = 1e-3
"""Where all batches are alike the two constants cannot be told apart: the step gets the time, not the token."""


class Reading(NamedTuple):
    """Counters since the start."""

    decode: PagerCounts
    prefill: PagerCounts
    steps: int
    step_seconds: float


class _Line:
    """Least squares for ``seconds = a * steps + b * tokens`` with a, b >= 0; an interval weighs as its steps."""

    def __init__(self, memory_s: float) -> None:
        self._memory = Forgetting(memory_s)
        self._sums = [0.0] * 5  # of x*x, x*y, y*y, x*s, y*s with x steps, y tokens, s seconds

    def add(self, now_s: float, steps: int, tokens: int, seconds: float) -> None:
        keep = self._memory.keep(now_s)
        products = (steps * steps, steps * tokens, tokens * tokens, steps * seconds, tokens * seconds)
        self._sums = [keep * old + new / steps for old, new in zip(self._sums, products, strict=True)]

    def solve(self) -> tuple[float, float]:
        """``(a, b)``; zeros before any interval."""
        xx, xy, yy, xs, ys = self._sums
        if xx <= 0:
            return 0.0, 0.0
        yy *= 1 + _RIDGE
        determinant = xx * yy - xy * xy
        if determinant > 0:
            a, b = (xs * yy - ys * xy) / determinant, (ys * xx - xs * xy) / determinant
            if a >= 0 and b >= 0:
                return a, b
            if a < 0:
                return 0.0, max(0.0, ys / yy)
        return max(0.0, xs / xx), 0.0


class StepFit:
    """Feed it readings; it answers with the constants and with how well they predicted the intervals so far."""

    def __init__(self, memory_s: float) -> None:
        """``memory_s``: how far back the fit looks, seconds."""
        self._decode, self._prefill = _Line(memory_s), _Line(memory_s)
        self._memory = Forgetting(memory_s)
        self._overhead_s, self._overhead_steps = 0.0, 0.0
        self._error_s, self._measured_s = 0.0, 0.0
        self._num_samples = 0
        self._last: Reading | None = None

    def observe(self, now_s: float, reading: Reading) -> CostFit:
        """Take in the interval since the last reading."""
        last = self._last
        if last is None or reading.steps - last.steps >= _LEAST_STEPS or reading.steps < last.steps:
            self._last = reading
            if last is not None and reading.steps > last.steps:
                self._take(now_s, last, reading)
        return self.fit()

    def fit(self) -> CostFit:
        """The constants now. What a step costs outside its forward counts as time of the step."""
        step_s, token_s = self._decode.solve()
        pass_s, prompt_token_s = self._prefill.solve()
        overhead_s = max(0.0, self._overhead_s / self._overhead_steps) if self._overhead_steps else 0.0
        return CostFit(
            step_s=step_s + overhead_s,
            token_s=token_s,
            pass_s=pass_s + overhead_s,
            prompt_token_s=prompt_token_s,
            error_fraction=self._error_s / self._measured_s if self._measured_s > 0 else 0.0,
            num_samples=self._num_samples,
        )

    def _take(self, now_s: float, last: Reading, now: Reading) -> None:
        measured_s = now.step_seconds - last.step_seconds
        keep = self._memory.keep(now_s)
        if self._num_samples:
            predicted_s = predict_s(self.fit(), last, now)
            self._error_s = keep * self._error_s + abs(predicted_s - measured_s)
            self._measured_s = keep * self._measured_s + measured_s
        forward_s = 0.0
        kinds = ((self._decode, last.decode, now.decode), (self._prefill, last.prefill, now.prefill))
        for line, before, after in kinds:
            steps, seconds = after.steps - before.steps, after.seconds - before.seconds
            forward_s += seconds
            if steps > 0:
                link_s = after.link_seconds - before.link_seconds
                line.add(now_s, steps, after.tokens - before.tokens, max(0.0, seconds - link_s))
        self._overhead_s = keep * self._overhead_s + measured_s - forward_s
        self._overhead_steps = keep * self._overhead_steps + (now.steps - last.steps)
        self._num_samples += 1


def predict_s(fit: CostFit, last: Reading, now: Reading) -> float:
    """Step time between two readings by ``fit``, the link's part as it was."""
    decode_steps, passes = now.decode.steps - last.decode.steps, now.prefill.steps - last.prefill.steps
    link_s = now.decode.link_seconds + now.prefill.link_seconds - last.decode.link_seconds - last.prefill.link_seconds
    return (
        decode_steps * fit.step_s
        + (now.decode.tokens - last.decode.tokens) * fit.token_s
        + passes * fit.pass_s
        + (now.prefill.tokens - last.prefill.tokens) * fit.prompt_token_s
        + link_s
    )
