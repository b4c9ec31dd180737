"""What several files of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.config import HttpSettings
from services.free_port import free_port
from services.ingress import server
from services.ingress.listener import Listener


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Listener]:
    """A public port that nobody serves yet; servers leave it quickly."""
    monkeypatch.setattr(server, "LEAVE_S", 0.2)
    with closing(Listener(HttpSettings(port=free_port()), tmp_path)) as opened:
        yield opened
