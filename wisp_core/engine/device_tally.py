"""Which session used which experts where the device decides: vLLM's batch joined with counts that the device keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wisp_core.contracts import Signature
from wisp_core.engine.session_tally import MAX_KEYS, prefixes
from wisp_core.engine.step_rows import session_of
from wisp_core.working_set.signature import HALF_LIFE_TOKENS, ExpertTally

if TYPE_CHECKING:
    from wisp_core.pager.device.uses import DeviceUses  # needs Triton, which a CPU machine has not

logger = logging.getLogger(f"vllm.{__name__}")  # below "vllm", whose handlers and level a server configures


class RequestKeys:
    """Session key of every request that the worker knows, from what the scheduler says as they come and go."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    def update(self, scheduler_output: Any) -> None:
        """Take in one step's news."""
        for request_id in scheduler_output.finished_req_ids:
            self._keys.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._keys[request.req_id] = session_of(request.sampling_params)

    def of(self, request_id: str) -> str:
        """ "" for a request without a session, or an unknown one."""
        return self._keys.get(request_id, "")


def first_row_keys(batch: Any, key_of: Callable[[str], str]) -> list[str | None]:
    """Session keys of a batch's first rows, those of requests that compute one token; None in a prompt.

    ``batch`` is the ``InputBatch`` of vLLM's second model runner, which puts such requests first.
    """
    keys: list[str | None] = []
    for request_id, num_tokens, is_prefilling in zip(
        batch.req_ids, batch.num_scheduled_tokens.tolist(), batch.is_prefilling_np.tolist(), strict=True
    ):
        if num_tokens != 1:
            break
        keys.append(None if is_prefilling else key_of(request_id))
    return keys


class DeviceSessionTally:
    """Signatures as `wisp_core.engine.session_tally.SessionTally` makes them, from what a device has counted."""

    def __init__(self, uses: DeviceUses, *, num_layers: int, num_experts: int, top_k: int) -> None:
        self._uses, self._top_k = uses, top_k
        self._shape = (num_layers, num_experts)
        self._requests = RequestKeys()
        self._num_tokens = 0
        self._has_missed_a_step = False
        self.reset()

    def reset(self) -> None:
        """Forget all counts, as after vLLM's own requests that warm up its kernels."""
        self._uses.reset()
        self._tally = ExpertTally(*self._shape, HALF_LIFE_TOKENS, MAX_KEYS)
        self._touched: set[str] = set()

    def begin_step(self, scheduler_output: Any) -> None:
        """A step starts."""
        self._requests.update(scheduler_output)
        self._num_tokens = scheduler_output.total_num_scheduled_tokens

    def end_step(self, batch: Any) -> None:
        """The step's launches are made; ``batch`` is what it ran, None if it ran nothing."""
        if batch is not None:
            self._uses.count(first_row_keys(batch, self._requests.of))
        elif self._num_tokens and not self._has_missed_a_step:
            self._has_missed_a_step = True
            logger.warning(
                "WiSP: vLLM's model runner does not show what a step computed, so no working set is learnt: unset "
                "VLLM_USE_V2_MODEL_RUNNER if it is 0, and use the vLLM that WiSP is made for"
            )

    def export_touched(self) -> list[Signature]:
        """Signatures of the keys that changed, in full, up to what the device has handed over."""
        for session_key, uses in self._uses.drain().items():
            num_rows = int(uses.counts[0].sum()) // self._top_k
            for key in prefixes(session_key):
                self._tally.add_counts(key, uses.counts, num_rows, uses.hits)
                self._touched.add(key)
        touched, self._touched = self._touched, set()
        signatures = (self._tally.signature(key) for key in sorted(touched))
        return [signature for signature in signatures if signature is not None]
