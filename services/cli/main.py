"""The ``wisp`` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.cli.passed_on import pass_on
from services.cli.tenant import app as tenant_app
from services.environment import prepare_driver
from wisp_core.errors import ConfigurationError, WispError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
model_app = typer.Typer(no_args_is_help=True, help="Models to try things with.")
app.add_typer(model_app, name="model")
trace_app = typer.Typer(no_args_is_help=True, help="Workloads as numbers, for plan and simulate.")
app.add_typer(trace_app, name="trace")
app.add_typer(tenant_app, name="tenant")
pass_on(app, "bench", "loadtests.bench", "Measure what paging, dividing, placing and sharing cost and gain.")
pass_on(app, "simulate", "loadtests.simulate", "Judge policies, splits and routers before they touch a replica.")

StateDir = Annotated[Path, typer.Option(help="The service's state directory.")]


@app.command()
def serve(
    config: Annotated[Path, typer.Option(help="The service's YAML file.")],
    redis_url: Annotated[str | None, typer.Option(help="A Redis to use instead of the file's or the embedded.")] = None,
    upgrade: Annotated[
        bool, typer.Option(help="Have the running service go on with this file; fails no turn.")
    ] = False,
) -> None:
    """Start a service and stay until SIGINT or SIGTERM."""
    if upgrade:
        if redis_url is not None:
            raise ConfigurationError("--redis-url: a running service keeps its Redis; leave it out with --upgrade")
        from services.cli.upgrade import request_upgrade

        request_upgrade(config)
        return
    from services.cli.serve import serve_until_stopped

    serve_until_stopped(config, redis_url)


@app.command()
def status(state_dir: StateDir = Path(".wisp")) -> None:
    """Show replicas, splits, sessions and the last decisions of a running service."""
    from services.cli.status import show_status

    show_status(state_dir)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Leave the service up and print the curl line.")] = False,
    policy: Annotated[str, typer.Option(help="Name of the allocation policy.")] = "mv_wsa",
    swap_phases: Annotated[bool, typer.Option(help="Long contexts first, then bursts, then long contexts.")] = False,
) -> None:
    """Drive agent sessions against two paged replicas and check every token."""
    from services.demo.run import run_demo

    raise typer.Exit(run_demo(keep=keep, policy=policy, is_swapped=swap_phases))


@app.command()
def load(
    users: Annotated[int, typer.Option(min=1, help="Concurrent agent sessions.")] = 8,
    run_time: Annotated[str, typer.Option(help="As Locust takes it, such as 30s or 5m.")] = "30s",
    state_dir: StateDir = Path(".wisp"),
    start: Annotated[bool, typer.Option(help="Start a service of the demo's kind for the run.")] = False,
) -> None:
    """Run Locust sessions against a running service and show both sides' figures."""
    from services.cli.load import run_load

    raise typer.Exit(run_load(users=users, run_time=run_time, state_dir=state_dir, is_own_service=start))


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A model's directory, or its Hugging Face name.")],
    vram_budget_gb: Annotated[float, typer.Option(min=0.1, help="All that it may hold on the card, 1e9 bytes.")],
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Turns that run at once.")] = 4,
    max_model_len: Annotated[
        int | None, typer.Option(min=64, help="Longest request, tokens; else the model's longest, 32768 at most.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="A workload: `wisp trace record`'s, or a public trace.")] = None,
    card: Annotated[str | None, typer.Option(help="Profile of a card; else the one in this machine.")] = None,
    link_gb_per_s: Annotated[float | None, typer.Option(min=0.1, help="Measured host-to-device speed.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    chunk_tokens: Annotated[int | None, typer.Option(min=64, help="Tokens per prefill pass; else the best.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As vLLM takes it; else the model's own.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="As vLLM takes it, such as fp8.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write the service's YAML here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of both curves: .svg or .png.")] = None,
) -> None:
    """Choose a split for a model, a card and a workload before anything runs, and say what it will do."""
    from services.cli.plan import PlanOptions, run_plan

    run_plan(
        PlanOptions(
            model=model,
            vram_budget_gb=vram_budget_gb,
            concurrency=concurrency,
            max_model_len=max_model_len,
            trace=trace,
            card=card,
            link_gb_per_s=link_gb_per_s,
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            output=output,
            plot=plot,
        )
    )


@trace_app.command()
def record(
    output: Annotated[Path, typer.Option(help="Where the recording goes, JSON lines.")],
    duration_s: Annotated[float, typer.Option(min=1, help="How long; Ctrl-C ends it earlier.")] = 60.0,
    state_dir: StateDir = Path(".wisp"),
) -> None:
    """Record what a running service does: turns in numbers, and what its replicas report. No prompts."""
    from services.cli.record import record_trace

    record_trace(output, duration_s, state_dir)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of a service's interface."""
    from services.ingress.openapi import openapi as document

    typer.echo(json.dumps(document(), indent=1))


@model_app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    arch: Annotated[str, typer.Option(help="qwen3_moe, mixtral or olmoe.")] = "qwen3_moe",
    experts: Annotated[int, typer.Option(help="Experts per layer (E).")] = 32,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 4,
    layers: Annotated[int, typer.Option()] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256,
    moe_intermediate: Annotated[int, typer.Option(help="Width inside an expert.")] = 256,
    topics: Annotated[int, typer.Option(help="Planted topics.")] = 8,
    words_per_topic: Annotated[int, typer.Option(help="Vocabulary of a topic.")] = 192,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 4,
    head_dim: Annotated[int, typer.Option()] = 64,
    max_positions: Annotated[int, typer.Option(help="Longest context, tokens.")] = 16384,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
) -> None:
    """Write a small MoE checkpoint with random weights and planted topics."""
    from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

    config = TinyModelConfig(
        arch=arch,
        experts=experts,
        top_k=top_k,
        layers=layers,
        hidden=hidden,
        moe_intermediate=moe_intermediate,
        topics=topics,
        words_per_topic=words_per_topic,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        dtype=dtype,
        seed=seed,
    )
    write_tiny_model(directory, config)
    typer.echo(f"{directory}: {arch}, {experts} experts x {layers} layers, top-{top_k}, {topics} topics")


def main() -> None:
    """Entry point: an error that the operator can fix is one message, not a traceback."""
    prepare_driver()
    try:
        app()
    except WispError as error:
        typer.secho(f"wisp: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)


if __name__ == "__main__":
    main()
