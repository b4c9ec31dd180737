"""Parts of `wisp bench service` that need no service: its prompts, its verdict, made-up weights, memory by process."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.service.gpu_memory import Watched, used_bytes_by_pid
from loadtests.service.made_up import LOAD_FORMAT, with_made_up_weights
from loadtests.service.run import sample_turns, turn_counts
from loadtests.service.service import is_good
from services.config import ServiceConfig
from wisp_core.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config() -> ServiceConfig:
    return ServiceConfig.load(ROOT / "infra" / "serve" / "gpu.yaml")


def test_the_gpu_example_shares_a_card_and_a_copy(config: ServiceConfig) -> None:
    replica = config.replica
    assert replica.count * replica.num_gpus == 1
    assert replica.vram_budget_bytes == 24 * 10**9
    assert replica.host_store_dir == "/dev/shm"
    assert len(config.tenants) == 2


def test_prompts_come_from_every_tenant_short_and_long() -> None:
    turns = sample_turns(["a", "b", "c"], 24)
    assert [turn.request("m") for turn in turns] == [turn.request("m") for turn in sample_turns(["a", "b", "c"], 24)]
    assert {(turn.tenant, turn.phase) for turn in turns} == {(t, p) for t in "abc" for p in ("burst", "long")}
    lengths = [len(str(turn.turn.messages)) for turn in turns if turn.phase == "long"]
    assert max(lengths) > 10 * min(lengths)


def test_turns_and_their_ttfts_are_not_added_up() -> None:
    rows = [
        {"Type": "POST", "Name": "burst turn", "Request Count": "47", "Failure Count": "1"},
        {"Type": "TTFT", "Name": "burst turn", "Request Count": "46", "Failure Count": "0"},
        {"Type": "POST", "Name": "long turn", "Request Count": "3", "Failure Count": "1"},
        {"Type": "", "Name": "Aggregated", "Request Count": "96", "Failure Count": "2"},
    ]
    assert turn_counts(rows) == {"requests": 50, "failures": 2}
    assert turn_counts([]) == {"requests": 0, "failures": 0}, "Locust did not run"


def test_a_run_is_good_only_if_everything_held() -> None:
    good: dict[str, Any] = {
        "requests": 10,
        "failures": 0,
        "identity_mismatches": 0,
        "identity_tokens": 100,
        "budget_exceeded": 0,
        "host_copies": [5],
    }
    assert is_good(good)
    for change in ({"requests": 0}, {"failures": 1}, {"identity_mismatches": 1}, {"identity_tokens": 0}):
        assert not is_good(good | change)
    assert not is_good(good | {"budget_exceeded": 1})
    assert not is_good(good | {"host_copies": [5, 5]})


def test_made_up_weights_are_found_by_every_engine_of_the_service(config: ServiceConfig, tmp_path: Path) -> None:
    made_up = with_made_up_weights(config, "qwen3-30b-a3b-4-layers", tmp_path)
    assert made_up.replica.engine["load_format"] == LOAD_FORMAT
    model = json.loads((Path(made_up.model.path) / "config.json").read_text())
    assert (model["num_hidden_layers"], model["num_experts"]) == (4, 128)
    assert (Path(made_up.model.path) / "tokenizer.json").exists()
    search = [path for path in made_up.replica.env["PYTHONPATH"].split(":") if path == str(tmp_path)]
    (found,) = importlib.metadata.distributions(path=search)
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("vllm.general_plugins", "loadtests.bench.child.weights:register")
    with pytest.raises(ConfigurationError, match="no such directory, and no shape"):
        with_made_up_weights(config, "gpt-5", tmp_path)


def test_memory_is_summed_over_devices_and_judged_by_reading() -> None:
    processes = {0: [(1, 100), (2, None)], 1: [(1, 50)]}
    nvml = SimpleNamespace(
        nvmlDeviceGetComputeRunningProcesses=lambda device: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes[device]
        ]
    )
    assert used_bytes_by_pid(nvml, [0, 1]) == {1: 150, 2: 0}
    watched = Watched(budget_bytes=100)
    for used_bytes in (90, 101, 40):
        watched.add(used_bytes)
    assert (watched.num_samples, watched.num_exceeded, watched.peak_bytes, watched.last_bytes) == (3, 1, 101, 40)
