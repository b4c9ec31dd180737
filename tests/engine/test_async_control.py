"""Commands to an engine in other processes that answers late, fails or dies meanwhile."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import engine_fixtures  # noqa: F401  first: imports vLLM without its warnings
import pytest

from wisp_core.contracts import MemoryLayout
from wisp_core.engine.control import CommandFailedError, DrainTimeoutError
from wisp_core.engine.reports import LayoutReport
from wisp_core.engine.vllm_control import AsyncControl, longest_step_s
from wisp_core.errors import EngineUnavailableError

STEP_S = 0.2


class StubLlm:
    """As an AsyncLLM whose engine runs steps of ``STEP_S`` and answers between them; ``pause`` is its drain."""

    errored = False

    def __init__(self, pause: Any = None) -> None:
        self._started_s = time.monotonic()
        self.pause = pause
        self.engine_core = SimpleNamespace(call_utility_async=self._between_steps)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [await self._between_steps(method, *args)]

    async def pause_generation(self, **_: Any) -> None:
        await self.pause

    async def _between_steps(self, *_: Any) -> bool:
        await asyncio.sleep(STEP_S - (time.monotonic() - self._started_s) % STEP_S)
        return True


def control_of(llm: StubLlm) -> AsyncControl:
    return AsyncControl(cast(Any, llm))


async def test_a_heartbeat_waits_for_one_step_not_for_two() -> None:
    async with asyncio.timeout(1.5 * STEP_S):
        await control_of(StubLlm()).ping()


async def test_a_drain_ends_when_the_engine_dies() -> None:
    llm = StubLlm(pause=asyncio.sleep(60.0))
    asyncio.get_running_loop().call_later(0.01, setattr, llm, "errored", True)
    async with asyncio.timeout(1.0):
        with pytest.raises(EngineUnavailableError, match="drain: the engine is dead"):
            await control_of(llm).drain(30.0)


async def test_a_drain_that_fails_says_why() -> None:
    async def pause() -> None:
        raise Exception("Call to pause_scheduler method failed")  # what vLLM raises

    with pytest.raises(CommandFailedError, match="drain: Call to pause_scheduler"):
        await control_of(StubLlm(pause=pause())).drain(30.0)


async def test_a_drain_takes_no_longer_than_it_may() -> None:
    with pytest.raises(DrainTimeoutError, match=r"requests still run after 0\.01 s"):
        await control_of(StubLlm(pause=asyncio.sleep(60.0))).drain(0.01)


@pytest.mark.parametrize(
    ("is_paged", "emulated_link_bytes_per_s", "least_s", "most_s"),
    [(True, None, 2 * 14 + 10, 120), (True, 1e9, 57 + 10, 120), (False, None, 10, 60)],
)
def test_a_step_that_copies_all_experts_over_a_slow_link_is_no_hang(
    is_paged: bool, emulated_link_bytes_per_s: float | None, least_s: float, most_s: float
) -> None:
    """At 3 GB/s a prefill of 57 GB of experts takes 14 s with a quarter of them in slots."""
    expert_bytes = 57 * 10**9 // (48 * 128)
    layout = MemoryLayout(
        page_bytes=1,
        num_layers=48,
        num_experts=128,
        top_k=8,
        is_paged=is_paged,
        min_cap=8,
        experts_bytes_by_cap=tuple(cap * 48 * expert_bytes for cap in range(129)),
        expert_bytes=expert_bytes,
        block_tokens=16,
        block_bytes=1,
        kv_group_blocks=1,
        max_kv_blocks=9,
        max_model_len=16,
        max_num_seqs=1,
    )
    facts = LayoutReport(
        layout=layout,
        budget_bytes=1,
        other_bytes=1,
        measured_other_bytes=1,
        worker_pid=1,
        emulated_link_bytes_per_s=emulated_link_bytes_per_s,
    )
    assert least_s < longest_step_s(facts) < most_s
