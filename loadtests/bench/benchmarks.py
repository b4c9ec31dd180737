"""What each benchmark of engines is made of: its configuration by machine, its engines, its figures, its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from loadtests.bench import configs, plan, prefetch, summary
from loadtests.rows import Row
from wisp_core.errors import ConfigurationError

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[Config]):
    """One of them."""

    on_gpu: Callable[[], Config]
    on_cpu: Callable[[], Config] | None
    """None: there is nothing to measure without a GPU."""
    jobs: Callable[[Config, plan.Model], list[plan.NamedJob]]
    summarize: Callable[[Sequence[Row]], dict[str, Any]]
    columns: str
    """Of its table, in words between blanks."""

    def config(self) -> Any:
        """The configuration for this machine. Raises ConfigurationError where there is none."""
        if configs.is_gpu_machine():
            return self.on_gpu()
        if self.on_cpu is None:
            raise ConfigurationError(f"`wisp bench {self.on_gpu().name}` needs a GPU")  # type: ignore[attr-defined]
        return self.on_cpu()


DECODE = Benchmark(
    on_gpu=configs.decode_h200,
    on_cpu=configs.decode_cpu,
    jobs=plan.decode_jobs,
    summarize=summary.decode_summary,
    columns="mode batch cap ms_per_step ms_per_step_p10 ms_per_step_p90 missed_bytes_per_step link_bytes_per_s "
    "peak_gpu_bytes offloaded_bytes output_hash",
)
PREFILL = Benchmark(
    on_gpu=configs.prefill_h200,
    on_cpu=configs.prefill_cpu,
    jobs=plan.prefill_jobs,
    summarize=summary.prefill_summary,
    columns="mode batch cap prompt_tokens chunk_tokens first_token_ms last_first_token_ms missed_bytes peak_gpu_bytes "
    "offloaded_bytes output_hash",
)
BUDGET = Benchmark(
    on_gpu=configs.budget_h200,
    on_cpu=None,
    jobs=plan.budget_jobs,
    summarize=summary.budget_summary,
    columns="measure budget_bytes cap batch prompt_tokens ms_per_step last_first_token_ms planned_ms "
    "planned_over_measured peak_gpu_bytes is_within_budget is_layout_as_planned",
)
IDENTITY = Benchmark(
    on_gpu=configs.identity_h200,
    on_cpu=None,  # there, tests/engine/test_paged_identity.py
    jobs=plan.identity_jobs,
    summarize=summary.identity_summary,
    columns="mode has_graphs is_resized cap prompts output_hash",
)
RESIZE = Benchmark(
    on_gpu=configs.resize_h200,
    on_cpu=configs.resize_cpu,
    jobs=plan.resize_jobs,
    summarize=summary.resize_summary,
    columns="mode direction cap_before cap outcome bytes_moved pause_ms is_answer_equal",
)
RETURN = Benchmark(
    on_gpu=configs.return_h200,
    on_cpu=configs.return_cpu,
    jobs=plan.return_jobs,
    summarize=summary.return_summary,
    columns="mode new_tokens cached_tokens first_token_ms first_token_ms_min first_token_ms_max missed_bytes "
    "fetch_bytes_per_s",
)
PREFETCH = Benchmark(
    on_gpu=prefetch.prefetch_h200,
    on_cpu=None,  # it runs beside computation
    jobs=prefetch.prefetch_jobs,
    summarize=prefetch.prefetch_summary,
    columns="mode prefetch cap batch ms_per_step missed_bytes_per_step prefetched_bytes prefetch_used_bytes "
    "prefetch_wasted_bytes output_hash",
)
