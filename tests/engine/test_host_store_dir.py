"""One copy of the experts per host: a restarted engine answers alike without reading them from the checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, PROMPTS, SAMPLING, Answer, answers
from ruined_checkpoint import ruin_experts

from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings


@pytest.fixture
def store_dir() -> Iterator[Path]:
    directory = Path("/dev/shm") / f"wisp-test-{os.getpid()}"
    directory.mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@contextmanager
def engine(model: Path, store_dir: Path | None, **arguments: Any) -> Iterator[OfflineEngine]:
    settings = WispSettings(
        cap=8,
        vram_budget_bytes=BUDGET_BYTES,
        activation_bytes=ACTIVATION_BYTES,
        host_store_dir=str(store_dir) if store_dir else None,
    )
    opened = OfflineEngine(str(model), {**ENGINE_ARGS, **arguments}, settings)
    try:
        yield opened
    finally:
        opened.shutdown()


def ask(model: Path, store_dir: Path | None, **arguments: Any) -> list[Answer]:
    with engine(model, store_dir, **arguments) as opened:
        found = answers(opened.generate(PROMPTS[:4], SAMPLING[:4]))
        opened.check_integrity()
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[Answer]:
    return ask(tiny_model, None)


@pytest.mark.parametrize("load_format", [None, "auto"])
def test_a_restarted_engine_does_not_read_the_experts(
    model: Path, store_dir: Path, expected: list[Answer], load_format: str | None
) -> None:
    arguments = {"load_format": load_format} if load_format else {}
    assert ask(model, store_dir, **arguments) == expected
    assert ruin_experts(model) > 32 << 20
    assert ask(model, store_dir, **arguments) == expected


def test_a_checkpoint_without_its_experts_gives_other_answers(model: Path, expected: list[Answer]) -> None:
    """What makes the test above a proof."""
    ruin_experts(model)
    assert ask(model, None) != expected


def test_a_changed_checkpoint_is_read_anew(model: Path, store_dir: Path) -> None:
    ask(model, store_dir)
    (old,) = store_dir.iterdir()
    os.utime(next(model.glob("*.safetensors")))
    ask(model, store_dir)
    # The old one goes as well once no process uses it, which this one still may (tests/unit/test_host_files.py).
    new = {path for path in store_dir.iterdir() if path != old}
    assert len(new) == 1
    assert (new.pop() / "ready").exists()
