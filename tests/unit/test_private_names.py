"""A vLLM that no longer asks what WiSP overrides or writes is refused where it is imported."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest

from wisp_core.private_names import check_kv_cache, check_loading, require


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


def test_a_manager_or_a_loader_that_no_longer_reads_what_is_written_is_refused() -> None:
    class Manager:
        def allocate_slots(self) -> int:
            return self.reserved_blocks  # type: ignore[attr-defined, no-any-return]

    class Loader:
        def _get_weights_iterator(self) -> Any:
            yield self.local_expert_ids  # type: ignore[attr-defined]

    with pytest.raises(ImportError, match=r"Manager\.allocate_slots does not use watermark_blocks:"):
        check_kv_cache(Manager)
    with pytest.raises(ImportError, match="weights_after_loading does not use requires_device_loading:"):
        check_loading(Loader, ModuleType("utils"))
