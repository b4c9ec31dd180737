"""A running service told to go on with a changed file: no faults, but parts are replaced or change while turns run."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import yaml

from loadtests.service.running import RunningService
from services.ingress.sessions import SESSION_HEADER

OWN = "own"
"""A tenant with a replica of its own, which comes and goes."""
_TIMEOUT_S = 600.0

Config = dict[str, Any]
"""A service's file."""


def _change_turns(config: Config, chooser: random.Random) -> None:
    _change(config["replica"], "max_ongoing_turns", range(50, 100), chooser)


def _change_window(config: Config, chooser: random.Random) -> None:
    _change(config["replica"], "window_s", range(8, 13), chooser)


def _change(settings: Config, name: str, values: range, chooser: random.Random) -> None:
    settings[name] = chooser.choice([value for value in values if value != settings.get(name)])


def _toggle_dedicated(config: Config, _: random.Random) -> None:
    others = [one for one in config["tenants"] if one["tenant_id"] != OWN]
    own = {**others[0], "tenant_id": OWN, "isolation": "dedicated", "key_file": f"{others[0]['key_file']}-{OWN}"}
    config["tenants"] = others if len(others) < len(config["tenants"]) else [*others, own]


UPGRADES: dict[str, Callable[[Config, random.Random], None]] = {
    "upgrade": _change_turns,
    "upgrade-engines": _change_window,
    "upgrade-dedicated": _toggle_dedicated,
}
"""What changes: something that replicas take as they run, something for which each needs a new engine, or a tenant with
a replica of its own."""


def upgrade(service: RunningService, kind: str, chooser: random.Random) -> None:
    """Change the service's file and have the service go on with it. Raises RuntimeError when it does not."""
    UPGRADES[kind](service.config, chooser)
    service.config_path.write_text(yaml.safe_dump(service.config))
    command = [sys.executable, "-m", "services.cli.main", "serve", "--config", str(service.config_path), "--upgrade"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"not upgraded: {done.stderr[-2000:]}")
    service.wait_ready()
    if kind == "upgrade-dedicated":
        check_own(service)


def check_own(service: RunningService) -> None:
    """Raises RuntimeError unless the tenant is served by its own replica, or is gone."""
    tenants = {one["tenant_id"]: one for one in service.config["tenants"]}
    if OWN not in tenants:
        return
    body = {"model": service.config["model"]["served_name"], "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": f"Bearer {service.key(OWN)}", SESSION_HEADER: "own"}
    answer = httpx.post(
        f"{service.url}/v1/chat/completions",
        json={**body, "max_tokens": 2},
        headers=headers,
        timeout=60,
        trust_env=False,
    )
    time.sleep(0.5)  # A turn is recorded after its answer.
    homes: dict[bool, set[str]] = {True: set(), False: set()}
    for one in service.status()["sessions"]:
        homes[one["session_key"].startswith(f"{OWN}/")].add(one["home"] or one["replica_id"])
    if answer.status_code != 200 or not homes[True] or homes[True] & homes[False]:
        raise RuntimeError(f"{OWN} got {answer.status_code} from {homes[True]}, others are at {homes[False]}")
