"""Command line of the simulator: ``wisp simulate``, or ``python -m loadtests.simulate``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from loadtests import command_line, report
from loadtests.report import Measured, Output
from loadtests.rows import Row
from loadtests.simulate import compare, replay, scale
from loadtests.simulate.engines import build_engine
from loadtests.traces import WORKFLOWS, generate, workflow
from policies.damping import Damped
from policies.registry import AnyPolicy, load_policy
from services.cli.plots import Line, Panel, check_picture, draw
from wisp_core.contracts import Split
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.recording import read_recording
from wisp_core.simulator.result import SimulationResult
from wisp_core.simulator.simulation import SimulationSettings, simulate
from wisp_core.simulator.trace import Trace

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Shape = Annotated[str, typer.Option(help="A model shape of loadtests.shapes.")]
Card = Annotated[str, typer.Option(help="Profile of a card, as in wisp plan.")]
Plot = Annotated[Path | None, typer.Option(help="Write a picture here: .svg or .png.")]


@app.command()
def run(
    work: Annotated[str, typer.Option("--workflow", help=f"One of {', '.join(WORKFLOWS)}.")] = "mixed_tenants",
    trace: Annotated[Path | None, typer.Option(help="A trace instead: WiSP's own, or a public one.")] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="Turns of the workflow, about: every agent gets a whole number.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of the workflow.")] = 0,
    shape: Shape = "qwen3-30b-a3b",
    card: Card = "rtx-4090",
    vram_budget_gb: Annotated[float, typer.Option(help="Budget of each replica, 1e9 bytes.")] = 24.0,
    max_model_len: Annotated[int, typer.Option(min=64)] = 32768,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=64)] = 32,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas, all alike.")] = 1,
    router: Annotated[str, typer.Option(help=f"One of {', '.join(scale.ROUTERS)}.")] = "scored",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy's name, and after a space its settings in YAML; again for more of them."),
    ] = None,
    cap: Annotated[list[int] | None, typer.Option(help="A static split of so many slots; again for more.")] = None,
    epoch_s: Annotated[float, typer.Option(min=0.1, help="Time between decisions.")] = 30.0,
    window_s: Annotated[float, typer.Option(min=1, help="Span of the rates that a policy sees.")] = 600.0,
    plot: Plot = None,
) -> None:
    """Run a workload under policies and static splits, and show them side by side."""
    if plot is not None:
        check_picture(plot)
    engine, routing = build_engine(
        shape=shape,
        card=card,
        budget_gb=vram_budget_gb,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        chunk_tokens=2048,
    )
    if router not in scale.ROUTERS:
        raise ConfigurationError(f"--router {router}: it is one of {', '.join(scale.ROUTERS)}")
    if work not in WORKFLOWS:
        raise ConfigurationError(f"--workflow {work}: it is one of {', '.join(WORKFLOWS)}")
    workload = generate(workflow(work, turns), seed=seed) if trace is None else read_recording(trace).trace
    settings = SimulationSettings(epoch_s=epoch_s, window_s=window_s)
    names = policy if policy or cap else ["static_split", "mv_wsa"]
    splits = [engine.largest_split(slots) for slots in _checked(cap, engine.layout.num_experts)]
    runs: list[tuple[str, Any, Split | None]] = [(f"cap {split.cap}", None, split) for split in splits]
    runs += [(name, Damped(policy=_policy(name)), None) for name in names or ()]
    results = {
        name: simulate(
            workload,
            engine,
            num_replicas=replicas,
            split=split,
            policy=one,
            router=scale.ROUTERS[router]() if replicas > 1 else None,
            routing=routing if router == "scored" else None,
            settings=settings,
        )
        for name, one, split in runs
    }
    _show_runs(workload, results)
    if plot is not None:
        draw(_run_panels(results), plot)


def _policy(option: str) -> AnyPolicy:
    name, _, text = option.partition(" ")
    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigurationError(f"--policy {option}: give NAME, or 'NAME {{SETTING: VALUE}}'")
    return load_policy(name, settings)


@app.command("compare")
def compare_policies(
    turns: Annotated[int | None, typer.Option(min=10, help="Turns of each trace.")] = None,
    fit_seed: Annotated[int | None, typer.Option(help="Seed of the traces that policies are fitted on.")] = None,
    judge_seed: Annotated[int | None, typer.Option(help="Seed of the traces that judge them.")] = None,
    card: Annotated[str | None, typer.Option(help="Profile of a card.")] = None,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Every policy against the oracle on five workflows at three budgets, and mv_wsa told wrong figures."""
    if plot is not None:
        check_picture(plot)
    config = compare.CompareConfig()
    given: dict[str, Any] = {"num_turns": turns, "fit_seed": fit_seed, "judge_seed": judge_seed, "card": card}
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    columns = ("workflow", "budget_gb", "policy", "cap", "mean_turn_s", "over_oracle", "resizes")
    rows = _save(config, compare.compare(config, command_line.say), compare.summarize, columns, output)
    if plot is not None:
        draw(_compare_panels(rows), plot)


@app.command("replay")
def replay_recordings(
    fit: Annotated[Path, typer.Option(help="Recording that costs are taken from, best of a split that was held.")],
    judge: Annotated[list[str], typer.Option(help="Recording to replay, as FILE:POLICY or FILE; again for more.")],
    chunk_tokens: Annotated[int, typer.Option(min=1, help="The service's max_num_batched_tokens.")] = 1024,
    epoch_s: Annotated[float, typer.Option(min=0.1, help="The service's policy.epoch_s.")] = 1.0,
    window_s: Annotated[float, typer.Option(min=0.1, help="The service's replica.window_s.")] = 5.0,
    output: Output = None,
) -> None:
    """Replay recordings of a live service (`wisp trace record`) and compare the latency of their turns."""
    judged = tuple((name, policy or "static") for name, _, policy in (item.partition(":") for item in judge))
    if str(fit) in {name for name, _ in judged}:
        raise ConfigurationError(f"--judge {fit}: give a recording other than --fit's")
    config = replay.ReplayConfig(
        fit=str(fit), judged=judged, pass_tokens=chunk_tokens, epoch_s=epoch_s, window_s=window_s
    )
    columns = "recording policy cap turns measured_turn_s simulated_turn_s off_by measured_ttft_s simulated_ttft_s"
    caps = {one.split.cap for one in read_recording(fit).snapshots}
    if len(caps) > 1:
        command_line.say(f"{fit}: its split moved, from {min(caps)} to {max(caps)} slots; it is replayed as one held")
    _save(config, replay.replays(config, Path()), replay.summarize, columns.split(), output)


@app.command("scale")
def measure_scale(output: Output = None) -> None:
    """How fast the simulator is, from one replica to ten thousand."""
    config = scale.ScaleConfig()
    columns = (
        "replicas",
        "turns",
        "router",
        "generate_s",
        "simulate_s",
        "cpu_us_per_turn",
        "mean_turn_s",
        "busy_share",
    )
    _save(config, scale.scale(config, command_line.say), _scale_summary, columns, output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    command_line.run(app, "wisp simulate", arguments)


def _save(
    config: Any,
    rows: Iterator[Row],
    summarize: Callable[[list[Row]], dict[str, Any]],
    columns: Sequence[str],
    output: Path | None,
) -> list[Row]:
    found = list(rows)
    path, command = output or report.result_path(config.name), command_line.typed_command("wisp simulate")
    report.finish(path, config, Measured.here(found), summarize(found), columns, command=command)
    return found


def _scale_summary(rows: list[Row]) -> dict[str, Any]:
    largest = max(rows, key=lambda row: (row["turns"], row["replicas"]))
    return {name: largest[name] for name in ("turns", "replicas", "simulate_s", "simulate_cpu_s")}


def _checked(caps: list[int] | None, num_experts: int) -> list[int]:
    wrong = [cap for cap in caps or () if not 1 <= cap <= num_experts]
    if wrong:
        raise ConfigurationError(f"--cap {wrong[0]}: a layer has {num_experts} experts")
    return caps or []


def _show_runs(trace: Trace, results: dict[str, SimulationResult]) -> None:
    missed = "missed, GB"
    rows = [
        {"policy": name, "split": str(one.splits[0]), missed: f"{one.summary()['missed_bytes'] / 1e9:,.1f}"}
        | one.summary()
        for name, one in results.items()
    ]
    columns = "policy split turns refused mean_turn_s p95_turn_s p95_ttft_s turns_per_s prefix_hit_share"
    report.print_table(
        f"{trace.source}: {len(trace)} turns, {trace.num_clients} clients", rows, [*columns.split(), missed, "resizes"]
    )


def _run_panels(results: dict[str, SimulationResult]) -> list[Panel]:
    """Latency's distribution, and the cap over time."""
    shares = [one / 100 for one in range(1, 100)]
    latency = [Line(name=name, xs=_quantiles(result, shares), ys=shares) for name, result in results.items()]
    caps = []
    for name, result in results.items():
        moves = [one for one in result.resizes if one.replica == 0]
        first = moves[0].before.cap if moves else result.splits[0].cap
        xs, ys = [0.0], [float(first)]
        for move in moves:
            xs += [move.at_s, move.at_s]
            ys += [ys[-1], float(move.after.cap)]
        caps.append(Line(name=name, xs=[*xs, result.makespan_s], ys=[*ys, ys[-1]]))
    return [
        Panel(title="latency of a turn", x_label="seconds", y_label="share of turns", lines=latency, top_y=1.0),
        Panel(title="split of replica 0", x_label="seconds", y_label="expert slots per layer", lines=caps),
    ]


def _quantiles(result: SimulationResult, shares: list[float]) -> list[float]:
    latency = sorted(one for one in result.latency_s.tolist() if one == one)
    return [latency[min(len(latency) - 1, int(share * len(latency)))] for share in shares]


def _compare_panels(rows: list[Row]) -> list[Panel]:
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if "%" not in name and name != "oracle"]
    budgets = sorted({row["budget_gb"] for row in rows})
    return [
        Panel(
            title=name,
            x_label="over the oracle's mean turn, % (mean of the budgets)",
            y_label="",
            bars=[(policy, _mean_over(rows, name, policy)) for policy in names],
        )
        for name in dict.fromkeys(row["workflow"] for row in rows)
    ] + [
        Panel(
            title="all workflows",
            x_label="budget, GB",
            y_label="over the oracle's mean turn, %",
            lines=[Line(name=policy, xs=budgets, ys=[_mean_at(rows, b, policy) for b in budgets]) for policy in names],
        )
    ]


def _mean_over(rows: list[Row], name: str, policy: str) -> float:
    return _mean([row["over_oracle"] for row in rows if (row["workflow"], row["policy"]) == (name, policy)])


def _mean_at(rows: list[Row], budget_gb: float, policy: str) -> float:
    return _mean([row["over_oracle"] for row in rows if (row["budget_gb"], row["policy"]) == (budget_gb, policy)])


def _mean(shares: list[float]) -> float:
    return 100 * sum(shares) / len(shares)
