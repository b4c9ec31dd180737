"""From a policy's name and settings to the policy: built-in, entry point in ``wisp.policies``, or ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from wisp_core.allocation.protocol import AllocationPolicy
from wisp_core.errors import ConfigurationError

ENTRY_POINT_GROUP = "wisp.policies"

BUILT_IN: Mapping[str, str] = {
    "mv_wsa": "policies.mv_wsa:MarginalValue",
    "static_split": "policies.static_split:StaticSplit",
    "fifty_fifty": "policies.fifty_fifty:FiftyFifty",
    "working_set_proportional": "policies.working_set_proportional:WorkingSetProportional",
    "kv_peak": "policies.kv_peak:KvPeak",
    "oracle": "policies.oracle:Oracle",
}

AnyPolicy = AllocationPolicy[Any]


def known_names() -> list[str]:
    """Built-in and installed policies, sorted."""
    return sorted({*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})


def load_policy(name: str, settings: Mapping[str, Any]) -> AnyPolicy:
    """Import and build the policy ``name`` with ``settings`` as keyword arguments.

    Raises ConfigurationError that names ``policy.name`` or ``policy.settings.KEY`` and what would be valid. Errors of
    the policy's own module, other than failing imports, pass through.
    """
    policy = _build(name, _find_factory(name), settings)
    missing = [method for method in ("initial_state", "decide") if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigurationError(f"policy.name: {name!r} is no policy, it has no method {' and no '.join(missing)}")
    return policy


def _find_factory(name: str) -> Callable[..., AnyPolicy]:
    target = name if ":" in name else BUILT_IN.get(name) or _entry_point(name)
    module_name, _, class_name = target.partition(":")
    try:
        factory = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = "; its directory has to be on PYTHONPATH" if is_missing else ""
        raise ConfigurationError(f"policy.name: cannot load {target!r}: {error}{hint}") from error
    if not callable(factory):
        raise ConfigurationError(f"policy.name: {target!r} is a {type(factory).__name__}, not a policy class")
    return factory  # type: ignore[no-any-return]


def _entry_point(name: str) -> str:
    found = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not found:
        known = ", ".join(one for one in known_names() if one != "oracle")  # which no name can start
        raise ConfigurationError(f"policy.name: unknown policy {name!r}; known: {known}, or module:Class")
    return next(iter(found)).value


def _build(name: str, factory: Callable[..., AnyPolicy], settings: Mapping[str, Any]) -> AnyPolicy:
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [key for key in settings if key not in parameters]
    if unknown:
        listed = ", ".join(parameters) or "none"
        raise ConfigurationError(
            "; ".join(f"policy.settings.{key}: unknown setting of {name}, which takes: {listed}" for key in unknown)
        )
    try:
        return factory(**settings)
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"policy.settings: {name} refused {dict(settings)}: {error}") from error
