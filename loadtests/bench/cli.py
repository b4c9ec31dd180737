"""Command line of the benchmarks: ``wisp bench``, or ``python -m loadtests.bench`` where only this package runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from loadtests.bench import configs, options, plan, report, summary
from loadtests.bench import prefetch as prefetching
from loadtests.bench.online import cli as of_a_service
from loadtests.bench.runner import Measured, run_jobs
from services.environment import prepare_driver
from wisp_core.errors import ConfigurationError, WispError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

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

_DECODE_COLUMNS = (
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
_PREFILL_COLUMNS = (
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
_PREFETCH_COLUMNS = (
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
_RESIZE_COLUMNS = ("mode", "direction", "cap_before", "cap", "outcome", "bytes_moved", "pause_ms", "is_answer_equal")
_RETURN_COLUMNS = (
    "mode",
    "new_tokens",
    "cached_tokens",
    "first_token_ms",
    "first_token_ms_min",
    "first_token_ms_max",
    "missed_bytes",
    "fetch_bytes_per_s",
)
_BUDGET_COLUMNS = (
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
_IDENTITY_COLUMNS = ("mode", "has_graphs", "is_resized", "cap", "prompts", "output_hash")


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
    changes: dict[str, Any] = {"engine": _engine(config.engine, model, routing, host_memory_gb)}
    if cap is not None:
        changes["fractions"] = options.floats(cap)
    if batch is not None:
        changes["batches"] = options.integers(batch)
    if baselines is not None:
        changes["baselines"] = options.baselines(baselines)
    if timed_tokens is not None:
        changes["timed_tokens"] = timed_tokens
    config = dataclasses.replace(config, **changes)
    _run(config, plan.decode_jobs, summary.decode_summary, _DECODE_COLUMNS, output, log_dir, deadline_s)


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
    changes: dict[str, Any] = {"engine": _engine(config.engine, model, routing, host_memory_gb)}
    if cap is not None:
        changes["fraction"] = cap
    if modes is not None:
        changes["modes"] = options.modes(modes)
    for name, text in (("batches", batch), ("prompt_tokens", prompt_tokens), ("chunk_tokens", chunk_tokens)):
        if text is not None:
            changes[name] = options.integers(text)
    config = dataclasses.replace(config, **changes)
    _run(config, plan.prefill_jobs, summary.prefill_summary, _PREFILL_COLUMNS, output, log_dir, deadline_s)


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
    engine = _engine(decode_config.engine, model, "trace", host_memory_gb)
    changes: dict[str, Any] = {"engine": engine}
    if cap is not None:
        changes["fractions"] = options.floats(cap)
    if baselines is not None:
        changes["baselines"] = options.baselines(baselines)
    decode_config = dataclasses.replace(decode_config, **changes)
    engine = _engine(prefill_config.engine, model, "trace", host_memory_gb)
    prefill_config = dataclasses.replace(prefill_config, engine=engine)
    if prompts is not None:
        prefill_config = dataclasses.replace(prefill_config, modes=options.modes(prompts))
    parts = (
        (decode_config, summary.decode_summary, _DECODE_COLUMNS),
        (prefill_config, summary.prefill_summary, _PREFILL_COLUMNS),
    )
    directory = (output or report.RESULTS).resolve()
    command = report.command_line()

    def own(measured: Measured, name: str) -> Measured:
        rows = [row for row in measured.rows if row.get("benchmark", name) == name]
        return dataclasses.replace(measured, rows=[{k: v for k, v in r.items() if k != "benchmark"} for r in rows])

    def save(measured: Measured) -> None:
        for config, summarize, _ in parts:
            mine = own(measured, config.name)
            path = directory / f"{config.name}-{engine.device}.json"
            report.write_result(path, config, command, mine, summarize(mine.rows))

    with tempfile.TemporaryDirectory() as scratch:
        jobs = plan.latency_jobs(decode_config, prefill_config, plan.find_model(engine.model, Path(scratch)))
        if only is not None:
            jobs = [one for mode in options.modes(only) for one in jobs if one[1].engine.mode == mode]
        measured = run_jobs(jobs, on_rows=save, say=_say, log_dir=log_dir, deadline_s=deadline_s)
    for config, summarize, columns in parts:
        mine = own(measured, config.name)
        report.print_table(f"{config.name}: {engine.model}", mine.rows, columns)
        path = directory / f"{config.name}-{engine.device}.json"
        typer.echo(report.last_line(config, path, mine, summarize(mine.rows)))
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
    config = dataclasses.replace(config, engine=_engine(config.engine, model, routing, host_memory_gb))
    if vram_budget_gb is not None:
        config = dataclasses.replace(
            config, budgets_bytes=tuple(int(gb * 1e9) for gb in options.floats(vram_budget_gb))
        )
    _run(config, plan.budget_jobs, summary.budget_summary, _BUDGET_COLUMNS, output, log_dir, deadline_s)


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
    config = dataclasses.replace(config, engine=_engine(config.engine, model, "real", host_memory_gb))
    _run(config, plan.identity_jobs, summary.identity_summary, _IDENTITY_COLUMNS, output, log_dir, deadline_s)


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
    changes: dict[str, Any] = {"engine": _engine(config.engine, model, "real", host_memory_gb)}
    if vram_budget_gb is not None:
        changes["budget_bytes"] = int(vram_budget_gb * 1e9)
    if step_mib is not None:
        changes["step_bytes"] = int(step_mib * 2**20)
    if resizes is not None:
        changes["resizes"] = resizes
    if traffic is not None:
        changes["resizes_under_traffic"] = traffic
    config = dataclasses.replace(config, **changes)
    _run(config, plan.resize_jobs, summary.resize_summary, _RESIZE_COLUMNS, output, log_dir, deadline_s)


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
    changes: dict[str, Any] = {"engine": _engine(config.engine, model, "real", host_memory_gb)}
    if vram_budget_gb is not None:
        changes["budget_bytes"] = int(vram_budget_gb * 1e9)
    if new_tokens is not None:
        changes["new_tokens"] = options.integers(new_tokens)
    for name, number in (("prompt_tokens", prompt_tokens), ("repeats", repeats)):
        if number is not None:
            changes[name] = number
    config = dataclasses.replace(config, **changes)
    _run(config, plan.return_jobs, summary.return_summary, _RETURN_COLUMNS, output, log_dir, deadline_s)


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
    changes: dict[str, Any] = {"engine": _engine(config.engine, model, "trace", host_memory_gb)}
    for name, text in (("caps", caps), ("batches", batch), ("guesses", guesses)):
        if text is not None:
            changes[name] = options.integers(text)
    config = dataclasses.replace(config, **changes)
    with tempfile.TemporaryDirectory() as scratch:
        concurrency = prefetching.concurrency_by_cap(config, plan.find_model(config.concurrency_model, Path(scratch)))

    def summarize(rows: Sequence[report.Row]) -> dict[str, Any]:
        return prefetching.prefetch_summary(config, rows) | {"concurrency": concurrency}

    _run(config, prefetching.prefetch_jobs, summarize, _PREFETCH_COLUMNS, output, log_dir, deadline_s)


@app.command()
def service(
    config: Annotated[Path, typer.Option(help="The service's YAML file, such as infra/serve/gpu.yaml.")],
    model: Annotated[str | None, typer.Option(help="Instead of its model: a checkpoint, 'tiny', or a shape.")] = None,
    users: Annotated[int, typer.Option(min=1, help="Agent sessions at once.")] = 8,
    run_time: Annotated[str, typer.Option(help="As Locust takes it, such as 5m.")] = "5m",
    samples: Annotated[int, typer.Option(min=1, help="Prompts to compare with an engine that holds all experts.")] = 24,
    kill_engine: Annotated[bool, typer.Option(help="Kill one engine and time its restart.")] = True,
    phase_s: Annotated[float, typer.Option(help="Length of phases of bursts and of long documents; 0: mixed.")] = 0.0,
    long_words: Annotated[int, typer.Option(min=1, help="Words of a long document.")] = 1500,
    output: Output = None,
) -> None:
    """A whole service under load: budget from outside, an engine killed, every token compared."""
    prepare_driver()  # before Ray is imported
    # Needs Ray, Locust and Valkey, which the other benchmarks run without.
    from loadtests.service.command import measure_service
    from loadtests.service.run import ServiceRun

    run = ServiceRun(
        users=users,
        run_time=run_time,
        num_samples=samples,
        is_engine_killed=kill_engine,
        phase_s=phase_s,
        long_words=long_words,
    )
    raise typer.Exit(measure_service(config, model, run, output))


@app.command()
def pager_overhead(output: Output = None) -> None:
    """What paging costs by itself: on a GPU its kernels without a model, on a CPU a pager that holds every expert."""
    if not configs.is_gpu_machine():
        decode(cap="1.0", baselines="none", output=output)
        return
    path = output or report.result_path("pager-overhead", "cuda")
    command = [sys.executable, "-m", "wisp_core.pager.device.benchmark", "--output", str(path)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error that the operator can fix is one message, not a traceback."""
    try:
        app(arguments, prog_name="wisp bench")
    except WispError as error:
        typer.secho(f"wisp bench: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)


def _run(
    config: Config,
    make_jobs: Callable[[Config, plan.Model], list[plan.NamedJob]],
    summarize: Callable[[Sequence[report.Row]], dict[str, Any]],
    columns: Sequence[str],
    output: Path | None,
    log_dir: Path | None,
    deadline_s: float | None,
) -> None:
    """Run, save after every engine, print; exit code 1 when no engine gave a row."""
    path = (output or report.result_path(config.name, config.engine.device)).resolve()
    command = report.command_line()

    def save(measured: Measured) -> None:
        report.write_result(path, config, command, measured, summarize(measured.rows))

    with tempfile.TemporaryDirectory() as scratch:
        jobs = make_jobs(config, plan.find_model(config.engine.model, Path(scratch)))
        measured = run_jobs(jobs, on_rows=save, say=_say, log_dir=log_dir, deadline_s=deadline_s)
    report.print_table(f"{config.name}: {config.engine.model}", measured.rows, columns)
    typer.echo(report.last_line(config, path, measured, summarize(measured.rows)))
    if all("error" in row for row in measured.rows):
        raise typer.Exit(1)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _engine(
    config: configs.EngineConfig, model: str | None, routing: str, host_memory_gb: float | None
) -> configs.EngineConfig:
    if routing not in ("trace", "real"):
        raise ConfigurationError(f"--routing {routing}: it is 'trace' or 'real'")
    wisp = config.wisp if host_memory_gb is None else config.wisp | {"host_memory_bytes": int(host_memory_gb * 1e9)}
    return dataclasses.replace(config, model=model or config.model, routing=routing, wisp=wisp)
