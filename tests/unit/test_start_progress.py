"""What a start says meanwhile."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from services import start_progress
from services.start_progress import progress_to, what_is_ready


def deployment(**replicas: int) -> SimpleNamespace:
    return SimpleNamespace(replica_states=replicas)


STATUS: Any = SimpleNamespace(
    applications={
        "wisp-policy": SimpleNamespace(deployments={"PolicyService": deployment(RUNNING=1)}),
        "wisp": SimpleNamespace(deployments={"Replica": deployment(RUNNING=1, STARTING=1), "Ingress": deployment()}),
    }
)


def test_each_deployment_is_told_with_how_many_replicas_run() -> None:
    assert what_is_ready(STATUS) == "PolicyService 1 of 1, Replica 1 of 2, Ingress 0 of 0"
    assert what_is_ready(SimpleNamespace(applications={})) == "Ray"  # type: ignore[arg-type]


def test_the_logs_are_named_first_and_progress_comes_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_temp_dir=lambda: "/tmp/ray", get_session_name=lambda: "session_1")
    monkeypatch.setattr(start_progress.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(start_progress.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(start_progress.serve, "status", lambda: STATUS)
    monkeypatch.setattr(start_progress, "PERIOD_S", 0.01)
    lines: list[str] = []
    told = threading.Event()
    before = set(threading.enumerate())

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            told.set()

    with progress_to(say):
        assert told.wait(5)
    assert lines[:2] == [
        "logs are in /tmp/ray/session_1/logs",
        "0 s, ready: PolicyService 1 of 1, Replica 1 of 2, Ingress 0 of 0",
    ]
    assert "start-progress" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_a_start_that_fails_before_ray_runs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress.ray, "is_initialized", lambda: False)
    lines: list[str] = []
    with progress_to(lines.append):
        pass
    assert lines == []


def test_of_a_start_that_is_interrupted_no_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, interrupted = list[str](), threading.Event()
    interrupted.set()
    monkeypatch.setattr(start_progress.ray, "is_initialized", lambda: True)
    with progress_to(lines.append, until=interrupted):
        pass
    assert lines == []
