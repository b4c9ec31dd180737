"""Commands of ``wisp bench`` that run a live service; everything heavy is imported when one is called."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadtests import report
from loadtests.bench import options, plan
from loadtests.bench.configs import is_gpu_machine
from loadtests.bench.online.in_process import in_process_cpu, in_process_h200
from loadtests.bench.runner import run_jobs
from loadtests.command_line import say
from loadtests.report import Measured, Merge, Output
from loadtests.rows import Row
from services.environment import prepare_driver
from wisp_core.errors import ConfigurationError

if TYPE_CHECKING:
    from loadtests.bench.online.results import Result


_ONLINE_COLUMNS = ("policy", "cap", "turns_per_s", "makespan_s", "ttft_p95_s", "failed_turns", "resizes", "bytes_moved")
_BALLOON_COLUMNS = (
    "barrier",
    "outcome",
    "kv_blocks_before",
    "kv_blocks",
    "applied_s",
    "longest_running_s",
    "turns_in_flight",
    "failed_turns",
)


def online(
    policy: Annotated[str, typer.Option(help="Divides the budget while the service runs, or none.")] = "mv_wsa",
    caps: Annotated[
        Any, typer.Option(parser=options.caps, metavar="TEXT", help="Static splits, slots per layer: 8,16; or none.")
    ] = None,
    workflow: Annotated[str | None, typer.Option(help="One of loadtests.bench.online.workload.PHASES.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Turns of the fixed set.")] = None,
    seed: Annotated[int, typer.Option(help="Of the set.")] = 0,
    deadline_s: Annotated[float | None, typer.Option(min=1, help="Cut each way after so many seconds.")] = None,
    in_process: Annotated[bool, typer.Option(help="The short form: one engine, no service; for a GPU.")] = False,
    model: Annotated[str | None, typer.Option(help="Short form: a shape's name, or a checkpoint's directory.")] = None,
    vram_budget_gb: Annotated[float | None, typer.Option(help="Short form: budget of the engine, 1e9 bytes.")] = None,
    host_memory_gb: Annotated[
        float | None, typer.Option(help="Short form: host memory that the pager may lock, 1e9 bytes.")
    ] = None,
    merge: Merge = None,
    record: Annotated[Path | None, typer.Option(help="Directory for recordings, for wisp simulate replay.")] = None,
    output: Output = None,
    log_dir: Annotated[Path | None, typer.Option(help="Short form: where the engine's log stays.")] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Where the model and the service's state go.")] = None,
) -> None:
    """Turns per second of a live service whose work has phases: divided online, and by every static split (CPU).

    Ways may run in processes of their own (--policy none --caps 16, and --caps none), and be merged afterwards.
    """
    changes = {"workflow": workflow, "num_turns": turns, "deadline_s": deadline_s, "caps": caps}
    given = {name: value for name, value in changes.items() if value is not None} | {"policy": policy, "seed": seed}
    of_one_engine = {
        "--model": model,
        "--vram-budget-gb": vram_budget_gb,
        "--host-memory-gb": host_memory_gb,
        "--log-dir": log_dir,
    }
    _refuse({"--record": record, "--work-dir": work_dir} if in_process else of_one_engine, in_process=in_process)
    if merge:
        result, path = _merged(merge, output)
    elif in_process:
        if vram_budget_gb is not None:
            given["vram_budget_bytes"] = int(vram_budget_gb * 1e9)
        result, path = _in_process(given, model, host_memory_gb, output, log_dir)
    else:
        result, path = _of_a_service(given, output, record, work_dir)
    report.print_table(f"{result.config.name}: {result.config.workflow}", result.measured.rows, _ONLINE_COLUMNS)
    report.print_last_line(result.config.name, path, result.measured.rows, result.summary)
    if any("error" in row for row in result.measured.rows):
        raise typer.Exit(1)


def _refuse(others: dict[str, Any], *, in_process: bool) -> None:
    """Raise ConfigurationError for options that only the other form has."""
    if given := [name for name, value in others.items() if value is not None]:
        raise ConfigurationError(f"{', '.join(given)}: not {'with' if in_process else 'without'} --in-process")


def _merged(files: list[Path], output: Path | None) -> tuple[Result, Path]:
    from loadtests.bench.online import results

    path = output or report.result_path("online", "merged")
    return results.merge(files, path), path


def _of_a_service(
    given: dict[str, Any], output: Path | None, record: Path | None, work_dir: Path | None
) -> tuple[Result, Path]:
    # Ray reads these when it is imported, and the service imports Ray.
    prepare_driver()
    from loadtests.bench.online import results, run
    from loadtests.bench.online.config import OnlineConfig

    config = dataclasses.replace(OnlineConfig(), **given)
    path = output or report.result_path(config.name)

    def result(rows: list[Row]) -> Result:
        return results.result_of(config, Measured.here(rows))

    def save(rows: list[Row]) -> None:
        results.save(result(rows), path)

    with tempfile.TemporaryDirectory() as scratch:
        rows = run.run_online(config, work_dir or Path(scratch), say=say, on_rows=save, record=record)
    return result(rows), path


def _in_process(
    given: dict[str, Any],
    model: str | None,
    host_memory_gb: float | None,
    output: Path | None,
    log_dir: Path | None,
) -> tuple[Result, Path]:
    from loadtests.bench.online import results

    config = in_process_h200() if is_gpu_machine() else in_process_cpu()
    wisp = {} if host_memory_gb is None else {"host_memory_bytes": int(host_memory_gb * 1e9)}
    engine = dataclasses.replace(config.engine, model=model or config.engine.model, wisp=config.engine.wisp | wisp)
    config = dataclasses.replace(config, engine=engine, **given)
    path = output or report.result_path(config.name, config.engine.device)

    def save(measured: Measured) -> None:
        results.save(results.result_of(config, measured), path)

    with tempfile.TemporaryDirectory() as scratch:
        jobs = plan.online_jobs(config, plan.find_model(config.engine.model, Path(scratch)))
        measured = run_jobs(jobs, on_rows=save, say=say, log_dir=log_dir)
    return results.result_of(config, measured), path


def balloon(
    output: Output = None,
    work_dir: Annotated[Path | None, typer.Option(help="Where the model and the service's state go.")] = None,
) -> None:
    """How soon KV blocks leave a pool that is in use: by the balloon, and behind a drained barrier (CPU)."""
    prepare_driver()  # before Ray is imported
    from loadtests.bench.online.balloon import BalloonConfig, run_balloon, summarize

    config = BalloonConfig()
    with tempfile.TemporaryDirectory() as scratch:
        rows = run_balloon(config, work_dir or Path(scratch), say)
    path = output or report.result_path(config.name)
    report.finish(path, config, Measured.here(rows), summarize(rows), _BALLOON_COLUMNS)
