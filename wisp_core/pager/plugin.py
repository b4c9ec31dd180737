"""Entry point of the group ``vllm.general_plugins``: vLLM calls it in every process before it builds a layer."""

from __future__ import annotations


def register() -> None:
    """Replace vLLM's RoutedExperts by the paged one, once per process; without a ``wisp`` object it acts as vLLM's.

    Raises ConfigurationError when another plugin has replaced that layer.
    """
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    import wisp_core.pager.expert_loader  # noqa: F401  # registers its load format
    from wisp_core.errors import ConfigurationError
    from wisp_core.pager.paged_experts import PagedRoutedExperts

    registered = op_registry_oot.get("RoutedExperts")
    if registered is PagedRoutedExperts:
        return
    if registered is not None:
        raise ConfigurationError(
            f"vLLM's RoutedExperts is already replaced by {registered.__module__}.{registered.__qualname__}; "
            "list only one of the two plugins in VLLM_PLUGINS"
        )
    PluggableLayer.register_oot(name="RoutedExperts")(PagedRoutedExperts)
