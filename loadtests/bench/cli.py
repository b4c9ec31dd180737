"""``wisp bench``: what paging, dividing, placing and sharing cost and gain; each run leaves a file of results.

Also ``python -m loadtests.bench``, where there are neither Ray nor Valkey.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtests import command_line, report
from loadtests.bench import configs, options, plan
from loadtests.bench.benchmarks import BUDGET, DECODE, IDENTITY, PREFETCH, PREFILL, RESIZE, RETURN, Benchmark
from loadtests.bench.online import cli as online
from loadtests.bench.prefetch import concurrency_by_cap
from loadtests.bench.runner import run_jobs
from loadtests.placement import cli as placement
from loadtests.report import Measured, Output
from loadtests.rows import Row
from loadtests.service import cli as service
from wisp_core.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

app.add_typer(service.app)
app.add_typer(placement.app)
app.command()(online.online)
app.command()(online.balloon)


def _parsed(parser: Callable[[str], Any], help_text: str, *names: str) -> Any:
    """An option whose text ``parser`` makes a value of: a tuple, or bytes."""
    return typer.Option(*names, parser=parser, metavar="TEXT", help=help_text)


Fractions = Annotated[Any, _parsed(options.floats, "Shares of the experts on the device: 0.25,0.5.", "--cap")]
Batches = Annotated[Any, _parsed(options.integers, "Requests at once: 1,4,8.", "--batch")]
Baselines = Annotated[Any, _parsed(options.baselines, "Each with a share: uva_experts:0.25; or 'none'.")]
Budget = Annotated[Any, _parsed(options.gigabytes, "Budget of the engine, 1e9 bytes.", "--vram-budget-gb")]
Routing = Annotated[str, typer.Option(help="trace: replay a seeded trace in every mode; real: the model's router.")]


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every benchmark of engines."""

    model: Annotated[str | None, typer.Option(help="A shape's name, or a directory with a checkpoint.")] = None
    output: Annotated[Path | None, typer.Option(help="The results file (latency: a directory); else a new one.")] = None
    log_dir: Annotated[Path | None, typer.Option(help="Where the engines' logs stay.")] = None
    host_memory_bytes: Annotated[
        Any, _parsed(options.gigabytes, "Host memory that the pager may lock, 1e9 bytes; else all.", "--host-memory-gb")
    ] = None
    deadline_s: Annotated[float | None, typer.Option(help="Seconds after which the run ends with what it has.")] = None

    def engine(self, config: configs.EngineConfig, routing: str) -> configs.EngineConfig:
        """``config`` with what was given."""
        if routing not in ("trace", "real"):
            raise ConfigurationError(f"--routing {routing}: it is 'trace' or 'real'")
        own = {} if self.host_memory_bytes is None else {"host_memory_bytes": self.host_memory_bytes}
        return dataclasses.replace(config, model=self.model or config.model, routing=routing, wisp=config.wisp | own)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Make ``function`` a command of its name, whose options are its own and those of `Common`, its first argument."""
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    shared = inspect.signature(Common, eval_str=True).parameters

    def run(**given: Any) -> None:
        function(Common(**{name: given.pop(name) for name in shared}), **given)

    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature([*own, *shared.values()])  # type: ignore[attr-defined]
    app.command(function.__name__.rstrip("_"))(run)
    return function


@_command
def decode(
    common: Common,
    fractions: Fractions = None,
    batches: Batches = None,
    baselines: Baselines = None,
    routing: Routing = "trace",
    timed_tokens: Annotated[int | None, typer.Option(min=4, help="Steps that are timed.")] = None,
) -> None:
    """Time per decode step: all experts resident, paged at each cap, and vLLM's own offloaders."""
    _run(
        DECODE,
        common,
        routing,
        fractions=fractions,
        batches=batches,
        baselines=baselines,
        timed_tokens=timed_tokens,
    )


@_command
def prefill(
    common: Common,
    fraction: Annotated[float | None, typer.Option("--cap", help="Share of the experts on the device.")] = None,
    batches: Batches = None,
    modes: Annotated[Any, _parsed(options.modes, "Modes to run: resident,paged.")] = None,
    prompt_tokens: Annotated[Any, _parsed(options.integers, "Lengths of prompts: 32,2000.")] = None,
    chunk_tokens: Annotated[Any, _parsed(options.integers, "Tokens per pass: 2048,8192.")] = None,
    routing: Routing = "trace",
) -> None:
    """Time to first token by length of prompts, prompts at once and tokens per pass."""
    _run(
        PREFILL,
        common,
        routing,
        fraction=fraction,
        batches=batches,
        modes=modes,
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
    )


@_command
def budget(
    common: Common,
    budgets_bytes: Annotated[Any, _parsed(options.several_gigabytes, "1e9 bytes: 16,24.", "--vram-budget-gb")] = None,
    routing: Routing = "trace",
) -> None:
    """What `wisp plan` says of a budget against what an engine does in it, the rest of the card being taken (GPU)."""
    _run(BUDGET, common, routing, budgets_bytes=budgets_bytes)


@_command
def identity(common: Common) -> None:
    """Answers, tokens and log-probabilities, of paged engines against resident ones (GPU)."""
    _run(IDENTITY, common, "real")


@_command
def resize(
    common: Common,
    budget_bytes: Budget = None,
    step_bytes: Annotated[Any, _parsed(options.mebibytes, "Least memory to move at a time, MiB.", "--step-mib")] = None,
    resizes: Annotated[int | None, typer.Option(min=2, help="Between requests, to and fro.")] = None,
    traffic: Annotated[int | None, typer.Option(min=1, help="Resizes to any split while requests run.")] = None,
) -> None:
    """Pause of the engine while memory moves between experts and KV, in both directions."""
    _run(
        RESIZE,
        common,
        "real",
        budget_bytes=budget_bytes,
        step_bytes=step_bytes,
        resizes=resizes,
        resizes_under_traffic=traffic,
    )


@_command
def return_(
    common: Common,
    budget_bytes: Budget = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the session before its pause.")] = None,
    new_tokens: Annotated[Any, _parsed(options.integers, "What it comes back with: 8,64.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Sessions of each kind that are timed.")] = None,
) -> None:
    """Time to the first token of a session that returns: prefix on the device, fetched from host memory, computed."""
    _run(
        RETURN,
        common,
        "real",
        budget_bytes=budget_bytes,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
    )


@_command
def prefetch(
    common: Common,
    caps: Annotated[Any, _parsed(options.integers, "Slots per layer: 8,16,32.")] = None,
    batches: Batches = None,
    guesses: Annotated[Any, _parsed(options.integers, "Experts per layer and step, with 0: 0,1,4.")] = None,
) -> None:
    """Prefetch of predicted experts, on against off; and the concurrency that each cap leaves room for (GPU)."""
    config = _config(PREFETCH, common, caps=caps, batches=batches, guesses=guesses)

    def summarize(rows: Sequence[Row]) -> Row:
        return PREFETCH.summarize(rows) | {"concurrency": concurrency_by_cap(config)}

    _measure(config, dataclasses.replace(PREFETCH, summarize=summarize), common)


@_command
def latency(
    common: Common,
    fractions: Fractions = None,
    baselines: Baselines = None,
    prompts: Annotated[Any, _parsed(options.modes, "Modes whose prompts are timed: resident,paged.")] = None,
    only: Annotated[Any, _parsed(options.modes, "Modes to run, in this order: resident,paged.")] = None,
) -> None:
    """`decode` and `prefill` with one engine for each mode: starting engines takes most of the time of either."""
    of_decode = _config(DECODE, common, fractions=fractions, baselines=baselines)
    of_prefill = _config(PREFILL, common, modes=prompts)
    engine, directory = of_decode.engine, common.output or report.RESULTS
    parts: list[tuple[Any, Benchmark[Any]]] = [(of_decode, DECODE), (of_prefill, PREFILL)]

    def own(measured: Measured, config: Any) -> tuple[Path, Measured]:
        rows = [row for row in measured.rows if row.get("benchmark", config.name) == config.name]
        rows = [{key: value for key, value in row.items() if key != "benchmark"} for row in rows]
        return directory / f"{config.name}-{engine.device}.json", dataclasses.replace(measured, rows=rows)

    def save(measured: Measured) -> None:
        for config, benchmark in parts:
            path, mine = own(measured, config)
            report.write_result(path, config, mine, benchmark.summarize(mine.rows))

    with tempfile.TemporaryDirectory() as scratch:
        jobs = plan.latency_jobs(of_decode, of_prefill, plan.find_model(engine.model, Path(scratch)))
        if only is not None:
            jobs = [one for mode in only for one in jobs if one[1].engine.mode == mode]
        measured = run_jobs(
            jobs, on_rows=save, say=command_line.say, log_dir=common.log_dir, deadline_s=common.deadline_s
        )
    for config, benchmark in parts:
        path, mine = own(measured, config)
        report.finish(path, config, mine, benchmark.summarize(mine.rows), benchmark.columns.split())
    _end(measured)


@app.command()
def pager_overhead(output: Output = None) -> None:
    """What paging costs by itself: on a GPU its kernels without a model, on a CPU a pager that holds every expert."""
    if not configs.is_gpu_machine():
        _run(DECODE, Common(output=output), fractions=(1.0,), baselines=())
        return
    path = output or report.result_path("pager-overhead", "cuda")
    command = [sys.executable, "-m", "loadtests.bench.child.pager_overhead", "--output", str(path)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    command_line.run(app, "wisp bench", arguments)


def _run(benchmark: Benchmark[Any], common: Common, routing: str = "trace", **changes: Any) -> None:
    _measure(_config(benchmark, common, routing, **changes), benchmark, common)


def _config(benchmark: Benchmark[Any], common: Common, routing: str = "trace", **changes: Any) -> Any:
    """The machine's configuration with those fields whose option was given."""
    config = benchmark.config()
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(config, engine=common.engine(config.engine, routing), **given)


def _measure(config: Any, benchmark: Benchmark[Any], common: Common) -> None:
    """Run, save after every engine, print."""
    path = common.output or report.result_path(config.name, config.engine.device)

    def save(measured: Measured) -> None:
        report.write_result(path, config, measured, benchmark.summarize(measured.rows))

    with tempfile.TemporaryDirectory() as scratch:
        jobs = benchmark.jobs(config, plan.find_model(config.engine.model, Path(scratch)))
        measured = run_jobs(
            jobs, on_rows=save, say=command_line.say, log_dir=common.log_dir, deadline_s=common.deadline_s
        )
    report.finish(path, config, measured, benchmark.summarize(measured.rows), benchmark.columns.split())
    _end(measured)


def _end(measured: Measured) -> None:
    """Exit with 1 when no engine gave a row."""
    if all("error" in row for row in measured.rows):
        raise typer.Exit(1)
