"""Two engines on one GPU share one host copy; a third, started after both died, answers alike from a ruined checkpoint.

The checkpoint's experts are overwritten before that start, so an engine that read them would answer differently.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from ruined_checkpoint import ruin_experts

from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

HERE = Path(__file__).parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", TinyModelConfig())
    return tmp_path / "model"


@pytest.fixture
def store_dir() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@contextmanager
def engine(model: Path, store_dir: Path) -> Iterator[dict[str, Any]]:
    """What an engine says, which then lives on until the context ends."""
    command = [sys.executable, str(HERE / "host_copy_child.py"), str(model), str(store_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = next((line for line in child.stdout if line.startswith('{"start_s"')), None)
        assert said is not None, f"it ended with {child.wait()}"
        yield json.loads(said)
        child.communicate()


def test_a_restart_reads_no_expert_and_two_engines_hold_one_copy(model: Path, store_dir: Path) -> None:
    with ExitStack() as both:
        first, second = (both.enter_context(engine(model, store_dir)) for _ in range(2))
        assert len(list(store_dir.iterdir())) == 1
        assert second["answers"] == first["answers"]
    assert ruin_experts(model) > 32 << 20
    with engine(model, store_dir) as restarted:
        assert restarted["answers"] == first["answers"]
    assert len(list(store_dir.iterdir())) == 1
    with TemporaryDirectory(dir="/dev/shm") as elsewhere, engine(model, Path(elsewhere)) as reader:
        assert reader["answers"] != first["answers"], "the checkpoint is ruined, and whoever reads it knows"
