"""Routers to choose from: WiSP's own, and Serve's, which it is compared with."""

from __future__ import annotations

from typing import Any

from services.config import RouterName

_CLASSES = {
    RouterName.WORKING_SET: "services.ingress.router.WispRouter",
    RouterName.POWER_OF_TWO: "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter",
    RouterName.CONSISTENT_HASH: "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}


def router_of(name: RouterName, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Class and keyword arguments for Serve's ``RequestRouterConfig``; ``kwargs`` are those of WiSP's own router."""
    return _CLASSES[name], kwargs if name is RouterName.WORKING_SET else {}
