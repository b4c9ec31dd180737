"""What a paged engine refuses at start, with the numbers and the setting that fixes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, MIB

from wisp_core.contracts import Split
from wisp_core.engine.offline import OfflineEngine
from wisp_core.errors import ConfigurationError
from wisp_core.settings import WispSettings

SETTINGS = WispSettings(vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES, bypass_if_it_fits=False)


def test_a_budget_that_cannot_hold_the_floor_is_refused_with_one_that_can(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="set vram_budget_bytes to") as caught:
        OfflineEngine(str(tiny_model), ENGINE_ARGS, SETTINGS.model_copy(update={"vram_budget_bytes": 24 * MIB}))
    needed_bytes = int(str(caught.value).split("set vram_budget_bytes to ")[1].split()[0])
    engine = OfflineEngine(
        str(tiny_model), ENGINE_ARGS, SETTINGS.model_copy(update={"vram_budget_bytes": needed_bytes})
    )
    assert engine.snapshot().split == Split(cap=4, kv_blocks=16)
    engine.shutdown()


def test_arguments_that_wisp_sets_itself_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"worker_cls: .*num_gpu_blocks_override: "):
        OfflineEngine(str(tiny_model), {"worker_cls": "x", "num_gpu_blocks_override": 9}, SETTINGS)
    with pytest.raises(ConfigurationError, match="vram_budget_bytes is needed"):
        OfflineEngine(str(tiny_model), {}, WispSettings(cap=8))


def test_a_cap_that_leaves_no_room_for_the_floor_is_refused(tiny_model: Path) -> None:
    tight = WispSettings(vram_budget_bytes=52 * MIB, activation_bytes=ACTIVATION_BYTES, cap=32)
    with pytest.raises(ConfigurationError, match=r"cap 32 does not fit .* the largest cap that does is \d+"):
        OfflineEngine(str(tiny_model), ENGINE_ARGS, tight)
