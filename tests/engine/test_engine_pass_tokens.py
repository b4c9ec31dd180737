"""An engine that is told no tokens of a pass gets those of the plan; no engine is started here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_fixtures import MIB

from loadtests.shapes import SHAPES, config_of
from wisp_core.engine import pass_tokens
from wisp_core.engine.arguments import paged_engine_args
from wisp_core.planner.cards import H200
from wisp_core.planner.chunk import CHUNKS
from wisp_core.planner.engine_pass import choose_for_engine
from wisp_core.settings import WispSettings

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config_of(SHAPES["qwen3-30b-a3b"])))
    return str(tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with an H200."""

    class Platform:
        @staticmethod
        def is_cpu() -> bool:
            return False

    monkeypatch.setattr(pass_tokens, "current_platform", Platform)
    monkeypatch.setattr(pass_tokens, "card_of_device", lambda: H200)


@pytest.mark.usefixtures("gpu")
def test_an_engine_without_a_size_is_given_the_plan_s_and_says_why(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(pass_tokens.logger, "info", lambda text, *values: said.append(text % values))
    settings = WispSettings(vram_budget_bytes=24 * GB)
    asked = {"max_model_len": 8192, "max_num_seqs": 8}
    expected = choose_for_engine(model, asked, settings, H200)
    arguments = paged_engine_args(model, asked, settings)
    assert arguments["max_num_batched_tokens"] == expected.chosen.tokens
    assert "max_num_batched_tokens is" in said[0]
    assert all(f"{tokens} tokens: cap" in said[0] for tokens in CHUNKS if tokens <= 8192)


@pytest.mark.usefixtures("gpu")
def test_what_the_caller_gives_stays(model: str) -> None:
    settings = WispSettings(vram_budget_bytes=24 * GB)
    arguments = paged_engine_args(model, {"max_num_batched_tokens": 777}, settings)
    assert arguments["max_num_batched_tokens"] == 777
    arguments = paged_engine_args(model, {"enable_chunked_prefill": False}, settings)
    assert "max_num_batched_tokens" not in arguments


def test_on_a_cpu_it_is_left_to_vllm(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = list[object]()
    monkeypatch.setattr(pass_tokens.logger, "warning", lambda *words: warned.append(words))
    arguments = paged_engine_args(model, {}, WispSettings(vram_budget_bytes=128 * MIB))
    assert "max_num_batched_tokens" not in arguments
    assert not warned
