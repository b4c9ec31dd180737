"""Real vLLM engines on CPU, in this process, on a tiny model."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: seconds instead of half a minute per engine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # every core
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

EngineFactory = Callable[..., AbstractContextManager[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings raised inside vLLM and what it imports are not this project's to fix."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(scope="module", autouse=True)
def engine_environment() -> Iterator[None]:
    """What vLLM reads when an engine is built; undone after each file, since other tests start servers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, os.environ.get(name, value))
        yield
    gc.collect()  # vLLM leaves its ZeroMQ contexts to this, with a warning: here it is ignored, in others' tests not.


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Qwen3-MoE: 4 layers, 32 experts, top-4."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, TinyModelConfig())
    return directory


@pytest.fixture(scope="session")
def open_engine(tiny_model: Path) -> EngineFactory:
    """``open_engine(wisp={...} or None, **engine arguments)``: a context with an `LLM`, gone at its end."""

    @contextmanager
    def open_one(wisp: dict[str, object] | None = None, **arguments: object) -> Iterator[Any]:
        from vllm import LLM

        if wisp is not None:
            arguments["additional_config"] = {"wisp": wisp}
        defaults: dict[str, object] = {"max_model_len": 512, "block_size": 32, "enforce_eager": True, "seed": 0}
        llm = LLM(str(tiny_model), disable_log_stats=False, **(defaults | arguments))
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()

    return open_one
