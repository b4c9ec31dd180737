"""Columns of the table that each benchmark prints."""

DECODE = (
    "mode",
    "batch",
    "cap",
    "ms_per_step",
    "ms_per_step_p10",
    "ms_per_step_p90",
    "missed_bytes_per_step",
    "link_bytes_per_s",
    "peak_gpu_bytes",
    "offloaded_bytes",
    "output_hash",
)
PREFILL = (
    "mode",
    "batch",
    "cap",
    "prompt_tokens",
    "chunk_tokens",
    "first_token_ms",
    "last_first_token_ms",
    "missed_bytes",
    "peak_gpu_bytes",
    "offloaded_bytes",
    "output_hash",
)
PREFETCH = (
    "mode",
    "prefetch",
    "cap",
    "batch",
    "ms_per_step",
    "missed_bytes_per_step",
    "prefetched_bytes",
    "prefetch_used_bytes",
    "prefetch_wasted_bytes",
    "output_hash",
)
RESIZE = ("mode", "direction", "cap_before", "cap", "outcome", "bytes_moved", "pause_ms", "is_answer_equal")
RETURN = (
    "mode",
    "new_tokens",
    "cached_tokens",
    "first_token_ms",
    "first_token_ms_min",
    "first_token_ms_max",
    "missed_bytes",
    "fetch_bytes_per_s",
)
BUDGET = (
    "measure",
    "budget_bytes",
    "cap",
    "batch",
    "prompt_tokens",
    "ms_per_step",
    "last_first_token_ms",
    "planned_ms",
    "planned_over_measured",
    "peak_gpu_bytes",
    "is_within_budget",
    "is_layout_as_planned",
)
IDENTITY = ("mode", "has_graphs", "is_resized", "cap", "prompts", "output_hash")
