"""Tokens of a prefill pass (``max_num_batched_tokens``) where nobody says how many: as `wisp plan` would choose them.

Without it vLLM takes 2,048 to 16,384 by the kind of card, and not by how much of it this engine may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from wisp_core.errors import WispError
from wisp_core.planner.cards import Card, card_like
from wisp_core.planner.engine_pass import choose_for_engine
from wisp_core.settings import WispSettings

logger = init_logger(f"vllm.{__name__}")  # below "vllm", whose handlers and level a server configures


def chosen_pass_tokens(model: str, engine_args: Mapping[str, Any], settings: WispSettings) -> int | None:
    """``max_num_batched_tokens`` for an engine of ``model``; None: leave it to vLLM.

    That is so where the caller says how many or wants whole prompts in one pass, on a CPU, whose activations nobody
    measures, and where the model's sizes cannot be told from its config.
    """
    is_given = engine_args.get("max_num_batched_tokens") is not None
    if is_given or engine_args.get("enable_chunked_prefill") is False or current_platform.is_cpu():
        return None
    try:
        choice = choose_for_engine(model, engine_args, settings, card_of_device())
    except WispError as error:
        logger.warning("WiSP: max_num_batched_tokens is left to vLLM: %s", error)
        return None
    logger.info(
        "WiSP: max_num_batched_tokens is %d, the best of: %s. Set it to have another", choice.chosen.tokens, choice
    )
    return choice.chosen.tokens


def card_of_device() -> Card:
    """The profile of this process's GPU, behind the link that its driver describes; nothing is put on the GPU."""
    memory_bytes = current_platform.get_device_total_memory()
    pcie, lanes = _pcie()
    return card_like(current_platform.get_device_name(), memory_bytes).in_machine(
        memory_bytes=memory_bytes, pcie=pcie, lanes=lanes
    )


def _pcie() -> tuple[int, int]:
    """Generation and lanes that device and slot can do; zeros where the driver does not say."""
    from vllm.third_party import pynvml  # not on a CPU

    try:
        pynvml.nvmlInit()
        index = current_platform.visible_device_id_to_physical_device_id(0)
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return (
            int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )
    except pynvml.NVMLError:
        return 0, 0
