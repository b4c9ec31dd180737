"""Which rows of a step belong to which session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SESSION_ARG = "wisp_session"
"""Key in ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``) that carries the namespaced session key."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A row that computes one token of a request whose prompt is done."""

    row: int
    session_key: str


class StepRows:
    """Decode rows of one step, read from vLLM's batch once the step has begun."""

    def __init__(self, scheduler_output: Any, model_runner: Any) -> None:
        self._num_scheduled = scheduler_output.num_scheduled_tokens
        self._model_runner = model_runner

    def decode_rows(self) -> list[DecodeRow]:
        """Rows in batch order, which is the order of ``input_batch`` and not the scheduler's.

        Valid from the first layer's forward on: vLLM reorders its batch before it runs the model.
        """
        found: list[DecodeRow] = []
        row = 0
        for request_id in self._model_runner.input_batch.req_ids:
            num_tokens = self._num_scheduled[request_id]
            request = self._model_runner.requests[request_id]
            if num_tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens:
                extra_args = getattr(request.sampling_params, "extra_args", None) or {}
                found.append(DecodeRow(row, str(extra_args.get(SESSION_ARG, ""))))
            row += num_tokens
        return found
