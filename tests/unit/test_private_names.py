"""A vLLM that no longer asks what WiSP overrides or writes is refused where it is imported."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from wisp_core.engine.private_names import require


class Scheduler:
    def schedule(self, request: Any) -> None:
        self._preempt_request(request, request.eligible_step)

    @functools.lru_cache  # noqa: B019  a decorated method is looked into
    def free(self) -> None:
        self._free_blocks()

    def _preempt_request(self, *args: Any) -> None: ...

    def _free_blocks(self) -> None: ...


def test_names_that_a_method_uses_are_found() -> None:
    require(Scheduler, "schedule", "_preempt_request", "eligible_step")
    require(Scheduler, "free", "_free_blocks")


@pytest.mark.parametrize(
    ("method", "names", "missing"),
    [
        ("schedule", ("_preempt_request", "_free_blocks", "other"), "schedule does not use _free_blocks, other:"),
        ("gone", ("_free_blocks",), "gone does not use _free_blocks:"),
    ],
)
def test_what_is_gone_is_named(method: str, names: tuple[str, ...], missing: str) -> None:
    with pytest.raises(ImportError, match=missing):
        require(Scheduler, method, *names)
