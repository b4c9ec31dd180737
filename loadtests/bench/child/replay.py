"""Routing from a trace instead of the router, the same in every mode.

Each layer's router is wrapped: it computes as always, and keeps its weights; only the ids are replaced by the trace's,
read from a buffer on the device. The buffer keeps its address, so a CUDA graph may capture the read; it is filled
before each step, when vLLM has settled which row of the batch belongs to which request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

REQUEST_PREFIX = "bench"
_SUFFIX_CHARS = 9  # vLLM appends "-" and eight random characters to a request's id
_STAGING_BUFFERS = 8  # more than the steps that can be in flight, so that none is overwritten before it is read


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, in order: for each request its session, first position and number of tokens."""

    sessions: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token."""
        return all(count == 1 for count in self.counts)


def request_id(session: int, run: str) -> str:
    """Id of a request that follows ``session`` of the trace; ``run`` makes it unique."""
    return f"{REQUEST_PREFIX}:{session}:{run}"


def session_of(engine_request_id: str) -> int | None:
    """The session in an id that `request_id` made and vLLM completed; None for vLLM's own warm-up requests."""
    if not engine_request_id.startswith(f"{REQUEST_PREFIX}:"):
        return None
    return int(engine_request_id[:-_SUFFIX_CHARS].split(":")[1])


class Replay:
    """The trace on the device, and the ids of the running step."""

    def __init__(self, trace: npt.NDArray[np.int16]) -> None:
        """``trace`` [layers, sessions, positions, top_k]."""
        self.trace = trace
        self.steps: list[StepRows] = []

    def install(self, model: Any, model_runner: Any, device: torch.device, max_tokens: int) -> None:
        """Wrap all routers of a loaded model and fill the buffer from now on. Call it before graphs are captured."""
        layers, _, self._positions, top_k = self.trace.shape
        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        if len(runners) != layers:
            raise ValueError(f"the trace has {layers} layers, the model {len(runners)} with experts")
        num_experts = runners[0].moe_config.num_experts
        self._table = torch.from_numpy(self.trace.reshape(layers, -1, top_k)).to(device)
        # Steps outside a request (profiling, capture) read ids that are valid and distinct within a row.
        spread = torch.arange(max_tokens * top_k, dtype=torch.int32, device=device) % num_experts
        self._ids = spread.view(1, max_tokens, top_k).repeat(layers, 1, 1)
        is_pinned = device.type == "cuda"
        self._staging = [
            torch.empty(max_tokens, dtype=torch.int64, pin_memory=is_pinned) for _ in range(_STAGING_BUFFERS)
        ]
        self._next_staging = 0
        for index, runner in enumerate(runners):
            runner.router = _ReplayRouter(runner.router, self._ids[index])
        _call_after_batch_is_settled(model_runner, self.begin_step)

    def begin_step(
        self, request_ids: list[str], starts: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]
    ) -> None:
        """Look up the ids of a step: for each request its first position and number of tokens."""
        sessions = tuple(session for session in map(session_of, request_ids) if session is not None)
        if len(sessions) != len(request_ids):
            return
        rows = StepRows(sessions, tuple(starts.tolist()), tuple(counts.tolist()))
        self.steps.append(rows)
        num_tokens = sum(rows.counts)
        staging = self._staging[self._next_staging]
        self._next_staging = (self._next_staging + 1) % _STAGING_BUFFERS
        staging.numpy()[:num_tokens] = self._flat_rows(rows)
        index = staging[:num_tokens].to(self._table.device, non_blocking=True)
        self._ids[:, :num_tokens].copy_(self._table.index_select(1, index))

    def ids_of(self, rows: StepRows, layer: int) -> npt.NDArray[np.int16]:
        """What ``layer`` was given in a step, [tokens, top_k]."""
        found: npt.NDArray[np.int16] = self.trace[layer].reshape(-1, self.trace.shape[-1])[self._flat_rows(rows)]
        return found

    def _flat_rows(self, rows: StepRows) -> npt.NDArray[np.int64]:
        """Rows of the trace [sessions * positions] of a step's tokens; a session longer than the trace starts over."""
        spans = zip(rows.sessions, rows.starts, rows.counts, strict=True)
        return np.concatenate(
            [
                session * self._positions + np.arange(start, start + count) % self._positions
                for session, start, count in spans
            ]
        )


class _ReplayRouter(BaseRouter):  # type: ignore[misc]
    """vLLM's router with its ids replaced."""

    def __init__(self, router: BaseRouter, ids: torch.Tensor) -> None:
        super().__init__(router.top_k, router.global_num_experts, router.eplb_state)
        self._router = router
        self._replayed_ids = ids  # int32 [max tokens, top_k]

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return self._router.routing_method_type

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, _ = self._router._compute_routing(hidden_states, router_logits, indices_type, input_ids=input_ids)
        return weights, self._replayed_ids[: weights.shape[0]]


def _call_after_batch_is_settled(model_runner: Any, begin_step: Any) -> None:
    """Both of vLLM's model runners prepare their inputs in one method, after which rows belong to requests."""
    if hasattr(model_runner, "prepare_inputs"):
        prepare = model_runner.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            counts = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
            begin_step(batch.req_ids, batch.num_computed_tokens_np[: batch.num_reqs], counts)
            return batch

        model_runner.prepare_inputs = prepare_inputs
        return
    prepare_v1 = model_runner._prepare_inputs

    def prepare_inputs_v1(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        batch = model_runner.input_batch
        begin_step(
            batch.req_ids, batch.num_computed_tokens_cpu[: batch.num_reqs], num_scheduled_tokens[: batch.num_reqs]
        )
        return prepare_v1(scheduler_output, num_scheduled_tokens, *args, **kwargs)

    model_runner._prepare_inputs = prepare_inputs_v1
