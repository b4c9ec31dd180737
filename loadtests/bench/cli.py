"""``wisp bench``: what paging, dividing, placing and sharing cost and gain; each run leaves a file of results.

Also ``python -m loadtests.bench``, where there are neither Ray nor Valkey.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from loadtests import command_line, report
from loadtests.bench import columns, configs, options, plan, summary
from loadtests.bench import prefetch as prefetching
from loadtests.bench.online import cli as of_a_service
from loadtests.bench.runner import run_jobs
from loadtests.placement import cli as placement
from loadtests.report import Measured
from loadtests.service import cli as service
from wisp_core.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

app.add_typer(service.app)
app.add_typer(placement.app)
app.command()(of_a_service.online)
app.command()(of_a_service.balloon)

Config = TypeVar(
    "Config",
    configs.DecodeConfig,
    configs.PrefillConfig,
    configs.ResizeConfig,
    configs.BudgetConfig,
    configs.IdentityConfig,
    configs.ReturnConfig,
    prefetching.PrefetchConfig,
)

Model = Annotated[str | None, typer.Option(help="A shape's name, or a directory with a checkpoint.")]
Caps = Annotated[str | None, typer.Option(help="Shares of the experts on the device, such as 0.25,0.5.")]
Batches = Annotated[str | None, typer.Option(help="Requests at once, such as 1,4,8.")]
Modes = Annotated[str | None, typer.Option(help="Baselines, each with a share, such as uva_experts:0.25; or 'none'.")]
Routing = Annotated[str, typer.Option(help="trace: replay a seeded trace in every mode; real: the model's router.")]
Output = Annotated[Path | None, typer.Option(help="The results file; else a new one under loadtests/results.")]
Logs = Annotated[Path | None, typer.Option(help="Where the engines' logs stay.")]
HostMemory = Annotated[
    float | None, typer.Option(help="Host memory that the pager may lock, 1e9 bytes; else what the system reports.")
]
Deadline = Annotated[float | None, typer.Option(help="Seconds after which the run ends with what it has.")]


@app.command()
def decode(
    model: Model = None,
    cap: Caps = None,
    batch: Batches = None,
    baselines: Modes = None,
    routing: Routing = "trace",
    timed_tokens: Annotated[int | None, typer.Option(min=4, help="Steps that are timed.")] = None,
    output: Output = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """Time per decode step: all experts resident, paged at each cap, and vLLM's own offloaders."""
    config = configs.decode_h200() if configs.is_gpu_machine() else configs.decode_cpu()
    config = _changed(
        config,
        engine=_engine(config.engine, model, routing, host_memory_gb),
        fractions=options.given(options.floats, cap),
        batches=options.given(options.integers, batch),
        baselines=options.given(options.baselines, baselines),
        timed_tokens=timed_tokens,
    )
    _run(config, plan.decode_jobs, summary.decode_summary, columns.DECODE, output, log_dir, deadline_s)


@app.command()
def prefill(
    model: Model = None,
    cap: Annotated[float | None, typer.Option(help="Share of the experts on the device.")] = None,
    batch: Batches = None,
    modes: Annotated[str | None, typer.Option(help="Modes to run, such as resident,paged.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Lengths of prompts, such as 32,2000.")] = None,
    chunk_tokens: Annotated[str | None, typer.Option(help="Tokens per pass, such as 2048,8192.")] = None,
    routing: Routing = "trace",
    output: Output = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """Time to first token by prompt length, prompts at once and tokens per pass."""
    config = configs.prefill_h200() if configs.is_gpu_machine() else configs.prefill_cpu()
    config = _changed(
        config,
        engine=_engine(config.engine, model, routing, host_memory_gb),
        fraction=cap,
        modes=options.given(options.modes, modes),
        batches=options.given(options.integers, batch),
        prompt_tokens=options.given(options.integers, prompt_tokens),
        chunk_tokens=options.given(options.integers, chunk_tokens),
    )
    _run(config, plan.prefill_jobs, summary.prefill_summary, columns.PREFILL, output, log_dir, deadline_s)


@app.command()
def latency(
    model: Model = None,
    cap: Caps = None,
    baselines: Modes = None,
    prompts: Annotated[str | None, typer.Option(help="Modes whose prompts are timed, such as resident,paged.")] = None,
    only: Annotated[str | None, typer.Option(help="Modes to run, in this order, such as resident,paged.")] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of both results files.")] = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """`decode` and `prefill` with one engine for each mode: starting engines takes most of the time of either."""
    is_gpu = configs.is_gpu_machine()
    decode_config = configs.decode_h200() if is_gpu else configs.decode_cpu()
    prefill_config = configs.prefill_h200() if is_gpu else configs.prefill_cpu()
    decode_config = _changed(
        decode_config,
        engine=_engine(decode_config.engine, model, "trace", host_memory_gb),
        fractions=options.given(options.floats, cap),
        baselines=options.given(options.baselines, baselines),
    )
    engine = _engine(prefill_config.engine, model, "trace", host_memory_gb)
    prefill_config = _changed(prefill_config, engine=engine, modes=options.given(options.modes, prompts))
    parts = (
        (decode_config, summary.decode_summary, columns.DECODE),
        (prefill_config, summary.prefill_summary, columns.PREFILL),
    )
    directory = output or report.RESULTS

    def own(measured: Measured, name: str) -> Measured:
        rows = [row for row in measured.rows if row.get("benchmark", name) == name]
        return dataclasses.replace(measured, rows=[{k: v for k, v in r.items() if k != "benchmark"} for r in rows])

    def save(measured: Measured) -> None:
        for config, summarize, _ in parts:
            mine = own(measured, config.name)
            path = directory / f"{config.name}-{engine.device}.json"
            report.write_result(path, config, mine, summarize(mine.rows))

    with tempfile.TemporaryDirectory() as scratch:
        jobs = plan.latency_jobs(decode_config, prefill_config, plan.find_model(engine.model, Path(scratch)))
        if (named := options.given(options.modes, only)) is not None:
            jobs = [one for mode in named for one in jobs if one[1].engine.mode == mode]
        measured = run_jobs(jobs, on_rows=save, say=command_line.say, log_dir=log_dir, deadline_s=deadline_s)
    for config, summarize, shown in parts:
        mine = own(measured, config.name)
        path = directory / f"{config.name}-{engine.device}.json"
        report.finish(path, config, mine, summarize(mine.rows), shown)
    if all("error" in row for row in measured.rows):
        raise typer.Exit(1)


@app.command()
def budget(
    model: Model = None,
    vram_budget_gb: Annotated[str | None, typer.Option(help="Budgets, 1e9 bytes, such as 16,24.")] = None,
    routing: Routing = "trace",
    output: Output = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """What `wisp plan` says of a budget against what an engine does in it, the rest of the card being taken (GPU)."""
    if not configs.is_gpu_machine():
        raise ConfigurationError("`wisp bench budget` needs a GPU")
    config = configs.budget_h200()
    budgets_gb = options.given(options.floats, vram_budget_gb)
    config = _changed(
        config,
        engine=_engine(config.engine, model, routing, host_memory_gb),
        budgets_bytes=None if budgets_gb is None else tuple(int(gb * 1e9) for gb in budgets_gb),
    )
    _run(config, plan.budget_jobs, summary.budget_summary, columns.BUDGET, output, log_dir, deadline_s)


@app.command()
def identity(
    model: Model = None,
    output: Output = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """Answers, tokens and log-probabilities, of paged engines against resident ones (GPU)."""
    if not configs.is_gpu_machine():
        raise ConfigurationError("`wisp bench identity` needs a GPU; on a CPU, tests/engine/test_paged_identity.py")
    config = configs.identity_h200()
    config = _changed(config, engine=_engine(config.engine, model, "real", host_memory_gb))
    _run(config, plan.identity_jobs, summary.identity_summary, columns.IDENTITY, output, log_dir, deadline_s)


@app.command()
def resize(
    model: Model = None,
    vram_budget_gb: Annotated[float | None, typer.Option(help="Budget of the engine, 1e9 bytes.")] = None,
    step_mib: Annotated[float | None, typer.Option(help="Least memory to move at a time, MiB.")] = None,
    resizes: Annotated[int | None, typer.Option(min=2, help="Between requests, to and fro.")] = None,
    traffic: Annotated[int | None, typer.Option(min=1, help="Resizes to any split while requests run.")] = None,
    output: Output = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """Pause of the engine while memory moves between experts and KV, in both directions."""
    config = configs.resize_h200() if configs.is_gpu_machine() else configs.resize_cpu()
    config = _changed(
        config,
        engine=_engine(config.engine, model, "real", host_memory_gb),
        budget_bytes=options.bytes_of(vram_budget_gb, 1e9),
        step_bytes=options.bytes_of(step_mib, 2**20),
        resizes=resizes,
        resizes_under_traffic=traffic,
    )
    _run(config, plan.resize_jobs, summary.resize_summary, columns.RESIZE, output, log_dir, deadline_s)


@app.command("return")
def session_return(
    model: Model = None,
    vram_budget_gb: Annotated[float | None, typer.Option(help="Budget of the engine, 1e9 bytes.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the session before its pause.")] = None,
    new_tokens: Annotated[str | None, typer.Option(help="What it comes back with, such as 8,64.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Sessions of each kind that are timed.")] = None,
    output: Output = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """Time to the first token of a session that returns: prefix on the device, fetched from host memory, computed."""
    config = configs.return_h200() if configs.is_gpu_machine() else configs.return_cpu()
    config = _changed(
        config,
        engine=_engine(config.engine, model, "real", host_memory_gb),
        budget_bytes=options.bytes_of(vram_budget_gb, 1e9),
        new_tokens=options.given(options.integers, new_tokens),
        prompt_tokens=prompt_tokens,
        repeats=repeats,
    )
    _run(config, plan.return_jobs, summary.return_summary, columns.RETURN, output, log_dir, deadline_s)


@app.command()
def prefetch(
    model: Model = None,
    caps: Annotated[str | None, typer.Option(help="Slots per layer, such as 8,16,32.")] = None,
    batch: Batches = None,
    guesses: Annotated[str | None, typer.Option(help="Experts per layer and step, 0 among them: 0,1,4.")] = None,
    output: Output = None,
    log_dir: Logs = None,
    host_memory_gb: HostMemory = None,
    deadline_s: Deadline = None,
) -> None:
    """Prefetch of predicted experts, on against off; and the concurrency that each cap leaves room for."""
    if not configs.is_gpu_machine():
        raise ConfigurationError(
            "prefetch runs beside computation, which needs a GPU: there is nothing to compare here"
        )
    config = prefetching.prefetch_h200()
    config = _changed(
        config,
        engine=_engine(config.engine, model, "trace", host_memory_gb),
        caps=options.given(options.integers, caps),
        batches=options.given(options.integers, batch),
        guesses=options.given(options.integers, guesses),
    )
    with tempfile.TemporaryDirectory() as scratch:
        concurrency = prefetching.concurrency_by_cap(config, plan.find_model(config.concurrency_model, Path(scratch)))

    def summarize(rows: Sequence[report.Row]) -> dict[str, Any]:
        return prefetching.prefetch_summary(config, rows) | {"concurrency": concurrency}

    _run(config, prefetching.prefetch_jobs, summarize, columns.PREFETCH, output, log_dir, deadline_s)


@app.command()
def pager_overhead(output: Output = None) -> None:
    """What paging costs by itself: on a GPU its kernels without a model, on a CPU a pager that holds every expert."""
    if not configs.is_gpu_machine():
        decode(cap="1.0", baselines="none", output=output)
        return
    path = output or report.result_path("pager-overhead", "cuda")
    command = [sys.executable, "-m", "loadtests.bench.child.pager_overhead", "--output", str(path)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    command_line.run(app, "wisp bench", arguments)


def _run(
    config: Config,
    make_jobs: Callable[[Config, plan.Model], list[plan.NamedJob]],
    summarize: Callable[[Sequence[report.Row]], dict[str, Any]],
    shown: Sequence[str],
    output: Path | None,
    log_dir: Path | None,
    deadline_s: float | None,
) -> None:
    """Run, save after every engine, print; exit code 1 when no engine gave a row."""
    path = output or report.result_path(config.name, config.engine.device)

    def save(measured: Measured) -> None:
        report.write_result(path, config, measured, summarize(measured.rows))

    with tempfile.TemporaryDirectory() as scratch:
        jobs = make_jobs(config, plan.find_model(config.engine.model, Path(scratch)))
        measured = run_jobs(jobs, on_rows=save, say=command_line.say, log_dir=log_dir, deadline_s=deadline_s)
    report.finish(path, config, measured, summarize(measured.rows), shown)
    if all("error" in row for row in measured.rows):
        raise typer.Exit(1)


def _changed(config: Config, **fields: Any) -> Config:
    """``config`` with those fields whose option was given."""
    return dataclasses.replace(config, **{name: value for name, value in fields.items() if value is not None})


def _engine(
    config: configs.EngineConfig, model: str | None, routing: str, host_memory_gb: float | None
) -> configs.EngineConfig:
    if routing not in ("trace", "real"):
        raise ConfigurationError(f"--routing {routing}: it is 'trace' or 'real'")
    wisp = config.wisp if host_memory_gb is None else config.wisp | {"host_memory_bytes": int(host_memory_gb * 1e9)}
    return dataclasses.replace(config, model=model or config.model, routing=routing, wisp=wisp)
