"""Which rows of a step belong to which session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

SESSION_ARG = "wisp_session"
"""Key in ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``) that carries the namespaced session key."""


def extra_args(sampling_params: Any) -> dict[str, Any]:
    """What a request carries beside vLLM's own parameters; ``sampling_params`` is None for one that does not sample."""
    arguments: dict[str, Any] = getattr(sampling_params, "extra_args", None) or {}
    return arguments


def session_of(sampling_params: Any) -> str:
    """A request's session key, "" for none."""
    return str(extra_args(sampling_params).get(SESSION_ARG, ""))


class DecodeRow(NamedTuple):
    """A row that computes one token of a request whose prompt is done."""

    row: int
    session_key: str


class PrefillRows(NamedTuple):
    """Rows that compute prompt tokens of one request; those found in the prefix cache are not computed."""

    start: int
    stop: int
    session_key: str


def step_kind(scheduler_output: Any) -> tuple[int, bool]:
    """Tokens of a step, and whether it is a prefill: one that computes more than one token of some request."""
    counts = scheduler_output.num_scheduled_tokens.values()
    return int(scheduler_output.total_num_scheduled_tokens), any(num_tokens > 1 for num_tokens in counts)


class StepRows:
    """Rows of one step, read from vLLM's batch once the step has begun.

    Rows come in batch order, which is the order of ``input_batch`` and not the scheduler's. Valid from the first
    layer's forward on: vLLM reorders its batch before it runs the model.
    """

    def __init__(self, scheduler_output: Any, model_runner: Any) -> None:
        self._num_scheduled = scheduler_output.num_scheduled_tokens
        self._model_runner = model_runner
        self._found: list[tuple[int, int, str, bool]] | None = None

    def request_ids(self) -> list[str]:
        """Requests of the batch, in its order; the list is vLLM's own and changes with the next step."""
        found: list[str] = self._model_runner.input_batch.req_ids
        return found

    def decode_rows(self) -> list[DecodeRow]:
        """Rows that compute one token of an answer."""
        return [DecodeRow(start, session_key) for start, _, session_key, is_prefill in self._all() if not is_prefill]

    def prefill_rows(self) -> list[PrefillRows]:
        """Rows that compute prompts."""
        return [
            PrefillRows(start, stop, session_key) for start, stop, session_key, is_prefill in self._all() if is_prefill
        ]

    def _all(self) -> list[tuple[int, int, str, bool]]:
        """The same as ``_requests``, read once."""
        if self._found is None:
            self._found = list(self._requests())
        return self._found

    def _requests(self) -> Iterator[tuple[int, int, str, bool]]:
        """First row, end, session and kind of each request in the batch."""
        row = 0
        for request_id in self._model_runner.input_batch.req_ids:
            num_tokens = self._num_scheduled[request_id]
            request = self._model_runner.requests[request_id]
            is_prefill = num_tokens > 1 or request.num_computed_tokens < request.num_prompt_tokens
            yield row, row + num_tokens, session_of(request.sampling_params), is_prefill
            row += num_tokens
