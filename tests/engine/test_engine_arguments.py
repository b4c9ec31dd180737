"""An operator's engine arguments over WiSP's defaults."""

from __future__ import annotations

from types import SimpleNamespace

import engine_fixtures  # noqa: F401  first: imports vLLM without its warnings
import pytest

from wisp_core.engine import arguments
from wisp_core.engine.arguments import resident_engine_args

DEFAULT = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False))


def test_what_an_object_does_not_name_stays_as_it_was() -> None:
    sizes = {"cudagraph_capture_sizes": [1, 2, 4]}
    assert resident_engine_args({"compilation_config": sizes})["compilation_config"] == {**DEFAULT, **sizes}
    assert resident_engine_args({})["compilation_config"] == DEFAULT


def test_what_is_named_is_taken() -> None:
    args = resident_engine_args({"compilation_config": {"cudagraph_mode": "NONE"}, "moe_backend": "auto"})
    assert args == {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}, "moe_backend": "auto"}
    assert resident_engine_args({"compilation_config": 3})["compilation_config"] == 3
