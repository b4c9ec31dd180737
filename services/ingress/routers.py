"""Routers to choose from: WiSP's own, and Serve's, which it is compared with."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from services.config import RouterName, RoutingSettings, Section, ServiceConfig
from services.store_address import StoreAddress

_CLASSES = {
    RouterName.WORKING_SET: "services.ingress.router.WispRouter",
    RouterName.POWER_OF_TWO: "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter",
    RouterName.CONSISTENT_HASH: "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}


class RouterConfig(Section):
    """Keyword arguments of WiSP's router class."""

    store: StoreAddress
    stale_after_s: float = Field(default=10.0, gt=0)
    routing: RoutingSettings = RoutingSettings()

    @classmethod
    def of(cls, config: ServiceConfig, store: StoreAddress) -> Self:
        """The router's part of a service's configuration."""
        return cls(store=store, stale_after_s=config.redis.stale_after_s, routing=config.routing)

    def kwargs(self) -> dict[str, Any]:
        """JSON only, as Serve passes them on."""
        return self.model_dump(mode="json")


def router_of(config: ServiceConfig, store: StoreAddress) -> tuple[str, dict[str, Any]]:
    """Class and keyword arguments for Serve's ``RequestRouterConfig``."""
    name = config.routing.router
    return _CLASSES[name], RouterConfig.of(config, store).kwargs() if name is RouterName.WORKING_SET else {}
