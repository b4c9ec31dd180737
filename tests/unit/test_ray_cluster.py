"""A service starts or joins Ray only where that can work, and says nothing that is no news."""

from __future__ import annotations

import logging
import signal
import socket

import pytest
import ray

from services.config import ServiceConfig
from services.ray_cluster import check_cluster, start_ray
from wisp_core.errors import ConfigurationError


def test_a_ray_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_cluster(f"127.0.0.1:{port}")
        check_cluster(f"ray://127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(
            ConfigurationError, match=f"RAY_ADDRESS {address}: no Ray there .*refused.*unset RAY_ADDRESS"
        ):
            check_cluster(address)


@pytest.mark.parametrize("address", ["head", "head:ray", "head:99999", ":6379", "ray://head"])
def test_a_ray_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match=f"RAY_ADDRESS {address}: give HOST:PORT"):
        check_cluster(address)


def test_a_start_that_ends_before_serve_s_keeps_serve_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(ConfigurationError):
        start_ray(ServiceConfig.model_construct())
    assert not logger.isEnabledFor(logging.INFO)


def test_signals_end_a_start_that_waits_for_what_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped_by() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, meanwhile = stopped_by(), list[object]()

    def init(**_: object) -> None:
        meanwhile.extend(stopped_by())
        raise ConnectionError("no Ray")

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ConfigurationError, match=r"RAY_ADDRESS .*: no Ray"):
            start_ray(ServiceConfig.model_construct())
    assert meanwhile == [signal.SIG_DFL, signal.SIG_DFL]
    assert stopped_by() == before


def test_a_cluster_that_ray_finds_is_left_to_ray() -> None:
    check_cluster("auto")
