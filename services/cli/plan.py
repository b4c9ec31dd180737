"""``wisp plan``: from a model, a card and a budget to a split, what it will do, and the settings for it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from services.cli.plots import Line, Panel, check_picture, draw
from wisp_core.errors import ConfigurationError
from wisp_core.pager.support import refused_experts
from wisp_core.planner.cards import CARDS, Card, card_named, find_card
from wisp_core.planner.estimate import Estimate
from wisp_core.planner.model_config import read_config
from wisp_core.planner.model_shape import ModelShape, read_shape
from wisp_core.planner.plan import Plan, PlanRequest, make_plan
from wisp_core.simulator.recording import read_recording

_WIDTH = 110
_MAX_MODEL_LEN = 32768
"""Unless told: what agents' contexts need, of the 128 k and more that models are said to take."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command's options."""

    model: str
    vram_budget_gb: float
    concurrency: int
    max_model_len: int | None
    trace: Path | None
    card: str | None
    link_gb_per_s: float | None
    block_size: int
    chunk_tokens: int | None
    dtype: str | None
    kv_dtype: str
    output: Path | None
    plot: Path | None


def run_plan(options: PlanOptions) -> None:
    """Print the plan; write its YAML and picture where asked. Raises ConfigurationError.

    A model that no engine can page yet is planned all the same, without settings to serve it.
    """
    for option, path in (("--output", options.output), ("--plot", options.plot)):
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"{option} {path}: there is no directory {path.parent}")
    if options.plot is not None:
        check_picture(options.plot)
    request = _request(options)
    refused = _refused(request.shape)
    if refused and options.output is not None:
        raise ConfigurationError(
            f"--output: `wisp serve` refuses {options.model}: {refused}; leave it out to see the plan"
        )
    plan = make_plan(request)
    settings = "" if refused else _settings_text(plan, options)
    # Before anything is printed: whoever reads that may close the pipe.
    if options.output is not None:
        _write(options.output, settings)
    if options.plot is not None:
        draw(curve_panels(plan), options.plot)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    _print_plan(console, plan, options)
    if refused:
        console.print(f"\nThere are no settings for it: `wisp serve` refuses {options.model}: {refused}.", style="bold")
    else:
        _print_settings(console, settings, plan, options)


def _refused(shape: ModelShape) -> str:
    """Why an engine on a GPU would refuse to page these experts; empty: it would not."""
    return "; ".join(
        refused_experts(
            quantization=shape.quantization if shape.has_quantized_experts else None,
            has_bias=shape.has_expert_bias,
            num_experts=shape.num_experts,
            is_on_gpu=True,
        )
    )


def _settings_text(plan: Plan, options: PlanOptions) -> str:
    settings = serve_settings(plan, options.model, options.dtype, options.kv_dtype)
    return yaml.safe_dump(settings, sort_keys=False)


def _print_settings(console: Console, text: str, plan: Plan, options: PlanOptions) -> None:
    console.print(f"\nwisp serve --config {options.output or 'FILE'}, where the file holds:\n", style="bold")
    typer.echo(text)
    console.print("The same split under a plain vllm serve, where it stays as it is:\n", style="bold")
    typer.echo(vllm_command(plan, options.model, options.dtype, options.kv_dtype))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigurationError(f"--output {path}: {error.strerror}") from error


def _request(options: PlanOptions) -> PlanRequest:
    card = find_card(options.card) if options.card is not None else card_of_this_machine()
    if options.link_gb_per_s is not None:
        card = card.with_link(options.link_gb_per_s * 1e9)
    budget_bytes = int(options.vram_budget_gb * 1e9)
    if budget_bytes > card.memory_bytes:
        raise ConfigurationError(
            f"--vram-budget-gb {options.vram_budget_gb:g}: {card.name} has {card.memory_bytes / 1e9:.1f} GB"
        )
    shape = read_shape(read_config(options.model), name=options.model, dtype=options.dtype, kv_dtype=options.kv_dtype)
    max_model_len = options.max_model_len or min(shape.max_positions or _MAX_MODEL_LEN, _MAX_MODEL_LEN)
    if 0 < shape.max_positions < max_model_len:
        raise ConfigurationError(f"--max-model-len {max_model_len}: the model's longest is {shape.max_positions}")
    recording = read_recording(options.trace) if options.trace is not None else None
    curves = None
    if recording is not None and recording.matches(shape.num_moe_layers, shape.num_experts, shape.top_k):
        curves = recording.expert_curves()
    return PlanRequest(
        shape=shape,
        card=card,
        budget_bytes=budget_bytes,
        concurrency=options.concurrency,
        max_model_len=max_model_len,
        trace=None if recording is None else recording.trace,
        curves=curves,
        block_size=options.block_size,
        chunk_tokens=options.chunk_tokens,
    )


def card_of_this_machine() -> Card:
    """The profile of the first GPU here. Raises ConfigurationError when there is none, or it has no profile."""
    query = shutil.which("nvidia-smi")
    if query is None:
        raise ConfigurationError(f"no GPU here: name one by --card ({', '.join(CARDS)})")
    fields = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
    command = [query, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    parts = [part.strip() for part in answer.partition("\n")[0].split(",")]
    card = card_named(parts[0])
    if card is None or len(parts) < len(fields.split(",")):
        raise ConfigurationError(
            f"no profile for {parts[0] or 'this GPU'!r}: name a like one by --card ({', '.join(CARDS)})"
        )
    memory_mib, pcie, lanes = (int(part) if part.isdecimal() else 0 for part in parts[1:4])
    return card.in_machine(memory_bytes=memory_mib << 20 or card.memory_bytes, pcie=pcie, lanes=lanes)


def serve_settings(plan: Plan, model: str, dtype: str | None, kv_dtype: str) -> dict[str, Any]:
    """A service's file for ``plan``; one replica and one tenant, to be completed."""
    engine: dict[str, Any] = {
        "max_model_len": plan.choice.max_model_len,
        "max_num_seqs": plan.choice.max_num_seqs,
        "max_num_batched_tokens": plan.choice.max_num_batched_tokens,
        "block_size": plan.choice.block_size,
        "enable_prefix_caching": True,
    }
    engine |= {"dtype": dtype} if dtype else {}
    engine |= {"kv_cache_dtype": kv_dtype} if kv_dtype != "auto" else {}
    return {
        "model": {"path": model},
        "replica": {
            "count": 1,
            "num_gpus": 1,
            "vram_budget_bytes": plan.request.budget_bytes,
            "other_bytes": plan.other_bytes,
            # A cap would have even a model that fits paged: the bypass is for whoever asks for none.
            **({} if plan.is_whole else {"initial_cap": plan.split.cap}),
            "engine": engine,
        },
        "policy": {"name": "mv_wsa"},
        "tenants": [{"tenant_id": "acme", "key_file": ".wisp/keys/acme.key"}],
    }


def vllm_command(plan: Plan, model: str, dtype: str | None, kv_dtype: str) -> str:
    """A ``vllm serve`` line with the same cap and KV."""
    wisp = {"wisp": {"cap": plan.split.cap}}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    arguments = ["vllm", "serve", model, "--max-model-len", str(plan.choice.max_model_len)]
    arguments += ["--max-num-seqs", str(plan.choice.max_num_seqs)]
    arguments += ["--max-num-batched-tokens", str(plan.choice.max_num_batched_tokens)]
    arguments += ["--block-size", str(plan.choice.block_size)]
    arguments += ["--kv-cache-memory-bytes", str(plan.layout.kv_bytes(plan.split.kv_blocks))]
    arguments += ["--dtype", dtype] if dtype else []
    arguments += ["--kv-cache-dtype", kv_dtype] if kv_dtype != "auto" else []
    if plan.is_whole:
        return shlex.join(arguments)
    arguments += ["--moe-backend", "triton", "--compilation-config", json.dumps(graphs)]
    return shlex.join([*arguments, "--additional-config", json.dumps(wisp)])


def curve_panels(plan: Plan) -> list[Panel]:
    """Both pools' costs over the cap, their sum, and the chosen point."""
    request, options = plan.request, plan.options
    caps = [split.cap for split, _, _ in plan.curve]
    decode = [seconds for _, seconds, _ in plan.curve]
    prefill = [seconds for _, _, seconds in plan.curve]
    total = [one + other for one, other in zip(decode, prefill, strict=True)]
    return [
        Panel(
            title=f"{Path(request.shape.name).name}, {request.budget_bytes / 1e9:g} GB, {request.card.name}",
            x_label="expert slots per layer (the rest is KV)",
            y_label="engine seconds per second",
            lines=(
                Line(name="decode (experts)", xs=caps, ys=decode),
                Line(name="prefill (KV reuse)", xs=caps, ys=prefill),
                Line(name="both", xs=caps, ys=total, is_dashed=True),
            ),
            chosen_x=plan.split.cap,
        ),
        Panel(
            title="simulated at the choice and beside it",
            x_label="expert slots per layer",
            y_label="mean turn, s",
            lines=(
                Line(name="mean turn", xs=[one.split.cap for one in options], ys=[one.mean_turn_s for one in options]),
            ),
            chosen_x=plan.split.cap,
        ),
    ]


def _print_plan(console: Console, plan: Plan, options: PlanOptions) -> None:
    request, shape = plan.request, plan.request.shape
    experts_bytes = plan.layout.experts_bytes_by_cap[plan.split.cap]
    kv_bytes = plan.layout.kv_bytes(plan.split.kv_blocks)
    console.print(_memory_table(plan, experts_bytes, kv_bytes))
    if plan.is_whole:
        console.print("Every expert fits: nothing is paged, and WiSP adds nothing but its service.")
    else:
        share = plan.split.cap / plan.layout.num_experts
        console.print(
            f"It fits with {plan.split.cap} of {plan.layout.num_experts} experts per layer on the card ({share:.0%}); "
            f"host memory holds all of them, {shape.experts_bytes / 1e9:.1f} GB. Prompts are computed in passes of "
            f"{plan.choice.max_num_batched_tokens} tokens."
        )
    console.print(
        f"One MiB more would save {_saving(plan.solution.marginals.experts_s_per_byte)} as experts and "
        f"{_saving(plan.solution.marginals.kv_s_per_byte)} as KV. {_why(plan)}"
    )
    console.print(_speed_table(plan))
    console.print(_option_table(plan))
    known = "measured" if request.curves is not None else "assumed (46 % of experts repeat, the rest Zipf)"
    console.print(f"Workload: {plan.workload}. Routing: {known}. Card: {request.card.link}; {request.card.source}.")


def _saving(s_per_byte: float) -> str:
    """What a MiB saves, of the engine's time; a step that costs more saves nothing."""
    us_per_s = s_per_byte * 2**20 * 1e6
    return f"{us_per_s:.2g} µs per second" if us_per_s > 0 else "nothing"


def _why(plan: Plan) -> str:
    largest = max(split.cap for split, _, _ in plan.curve)
    if plan.split.cap == largest and not plan.is_whole:
        turns = plan.choice.max_num_seqs
        return f"More slots would leave less KV than κ_min, {plan.floor_blocks} blocks for {turns} turns."
    return ""


def _memory_table(plan: Plan, experts_bytes: int, kv_bytes: int) -> Table:
    table = Table(title=f"{plan.request.shape.name} in {plan.request.budget_bytes / 1e9:g} GB")
    table.add_column("part")
    table.add_column("GB", justify="right")
    table.add_column("what")
    shape, chunk_tokens = plan.request.shape, plan.choice.max_num_batched_tokens
    rows = (
        ("dense weights", shape.dense_bytes, f"{shape.dtype}, quantization {shape.quantization}"),
        (
            "the rest",
            plan.other_bytes - shape.dense_bytes,
            f"activations of {chunk_tokens} tokens, context",
        ),
        ("experts", experts_bytes, f"{plan.split.cap} slots in each of {shape.num_moe_layers} layers"),
        ("KV cache", kv_bytes, f"{plan.split.kv_blocks} blocks, {plan.kv_tokens} tokens"),
        ("left over", plan.pooled_bytes - experts_bytes - kv_bytes, "less than a KV group"),
    )
    for name, num_bytes, what in rows:
        table.add_row(name, f"{num_bytes / 1e9:.2f}", what)
    return table


def _speed_table(plan: Plan) -> Table:
    table = Table(title="Predicted")
    table.add_column("what")
    for name in ("expected", "from", "to"):
        table.add_column(name, justify="right")
    chosen, batch = plan.chosen, plan.choice.max_num_seqs
    batches = [("1 turn", chosen.decode_one, 1), (f"{batch} turns", chosen.decode_all, batch)]
    for name, estimate, rows in batches[: 1 if batch == 1 else 2]:
        table.add_row(f"decode step of {name}, ms", *_cells(estimate, 1e3, 1))
        table.add_row(
            f"tokens/s of {name}",
            *(f"{rows / s:.1f}" for s in (estimate.seconds, estimate.high_s, estimate.low_s)),
        )
    for tokens, estimate in plan.first_tokens:
        table.add_row(f"time to first token of {tokens} new tokens, s", *_cells(estimate, 1, 2))
    tokens, estimate = plan.fetch
    table.add_row(f"KV of {tokens} tokens back from host memory (kv_host_bytes), s", *_cells(estimate, 1, 3))
    return table


def _cells(estimate: Estimate, factor: float, digits: int) -> tuple[str, ...]:
    return tuple(f"{s * factor:.{digits}f}" for s in (estimate.seconds, estimate.low_s, estimate.high_s))


def _option_table(plan: Plan) -> Table:
    table = Table(title="The choice and its neighbours")
    names = ("cap", "KV tokens", "engine s/s", "mean turn, s", "against the choice", "ms/step, 1 turn", "ms/step, all")
    for name in names:
        table.add_column(name, justify="right")
    chosen = plan.chosen
    for option in plan.options:
        table.add_row(
            f"{option.split.cap}{' *' if option is chosen else ''}",
            str(option.split.kv_blocks * plan.layout.block_tokens),
            f"{option.cost:.3f}",
            f"{option.mean_turn_s:.2f}",
            f"{option.mean_turn_s / chosen.mean_turn_s - 1:+.1%}",
            f"{option.decode_one.seconds * 1e3:.1f}",
            f"{option.decode_all.seconds * 1e3:.1f}",
        )
    return table
