"""Serve asks the policy and follows it, with real replicas that report turns as the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve

from services.config import AutoscalingSettings
from services.replica.autoscaling import COPY_SHARE, TURNS, autoscaling_config

APP = "autoscaling"


class Reporting:
    """Reports the turns that stand in a file; a turn lasts until a file is there."""

    def __init__(self, path: str) -> None:
        self._turns, self._end = Path(path), Path(path).with_name("end")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {TURNS: float(self._turns.read_text()), COPY_SHARE: 0.0}

    async def __call__(self) -> str:
        while not self._end.exists():  # noqa: ASYNC110  # the test is another process
            await asyncio.sleep(0.05)
        return serve.get_replica_context().replica_tag


@pytest.fixture
def turns(ray_serve: None, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "turns"
    path.write_text("1")
    scaling = autoscaling_config(1, AutoscalingSettings(max_count=2, target_turns=4, up_delay_s=0.5, down_delay_s=0.5))
    # Serve looks each 10 s at the last 30 s, and has only fields that it warns of to say otherwise.
    scaling |= {"metrics_interval_s": 1.0, "look_back_period_s": 3.0}
    deployment = serve.deployment(
        Reporting,
        name="Reporting",
        autoscaling_config=scaling,
        graceful_shutdown_timeout_s=60,
        ray_actor_options={"num_cpus": 0.1},
    )
    serve.run(deployment.bind(str(path)), name=APP, route_prefix=None)
    yield path
    path.with_name("end").touch()
    serve.delete(APP)


def replica_states() -> dict[str, int]:
    return serve.status().applications[APP].deployments["Reporting"].replica_states


def wait_for(states: dict[str, int], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while (now := replica_states()) != states:
        assert time.monotonic() < deadline_s, now
        time.sleep(0.1)


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
def test_replicas_come_with_turns_and_go_when_theirs_have_ended(turns: Path) -> None:
    wait_for({"RUNNING": 1})
    turns.write_text("6")
    wait_for({"RUNNING": 2})
    handle = serve.get_deployment_handle("Reporting", APP)
    answers = [handle.remote() for _ in range(8)]
    turns.write_text("0.5")
    wait_for({"RUNNING": 1, "STOPPING": 1})
    time.sleep(3.0)
    assert replica_states() == {"RUNNING": 1, "STOPPING": 1}, "it waits for its turns"
    turns.with_name("end").touch()
    assert len({answer.result(timeout_s=30) for answer in answers}) == 2, "no turn of the one that goes is lost"
    wait_for({"RUNNING": 1})
