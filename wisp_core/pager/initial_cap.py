"""The cap that a pager starts with."""

from __future__ import annotations

from wisp_core.errors import ConfigurationError
from wisp_core.settings import WispSettings


def initial_cap(settings: WispSettings, num_experts: int, top_k: int) -> int:
    """The configured cap, or the smallest one when only a budget is given.

    Raises ConfigurationError for a cap outside top-k..E, naming the setting.
    """
    smallest = settings.min_cap if settings.min_cap is not None else top_k
    if settings.cap is None and settings.vram_budget_bytes is None:
        raise ConfigurationError(
            f"additional_config.wisp needs 'cap' ({top_k}..{num_experts} expert slots per layer) or 'vram_budget_bytes'"
        )
    for name, cap in (("min_cap", smallest), ("cap", settings.cap)):
        if cap is not None and not top_k <= cap <= num_experts:
            raise ConfigurationError(
                f"additional_config.wisp.{name} is {cap}, but this model routes each token to {top_k} of "
                f"{num_experts} experts: set it to {top_k}..{num_experts}"
            )
    # With a budget only, start small: whoever owns the budget grows the cap once all sizes are known.
    return settings.cap if settings.cap is not None else smallest
