"""What paging itself costs on this GPU, without a model: link, gather, plan, resize.

    python -m loadtests.bench.child.pager_overhead --output loadtests/results/device-pager-overhead-h200.json

Each figure is the median of repeated runs, timed by device events, with the least and the largest. The link is a
page-locked copy measured in the same process, the routing a seeded trace.
"""

from __future__ import annotations

import argparse
import math
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loadtests.bench.child.hardware import facts
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.command_line import typed_command
from loadtests.report import print_last_line, write_content
from loadtests.routing_trace import TraceConfig, routing_trace
from loadtests.rows import Row
from loadtests.shapes import SHAPES, Shape
from wisp_core.memory.cuda_vmm import CudaBacking
from wisp_core.pager.device.cap_kernel import set_cap
from wisp_core.pager.device.gather_kernel import Gather
from wisp_core.pager.device.plan_kernel import plan_step
from wisp_core.pager.device.state import DeviceState, Header, Lists

DEVICE = "cuda"


def event_times_s(
    run: Callable[[], object], repeats: int, prepare: Callable[[int], object] | None = None
) -> list[float]:
    """Device seconds of each of ``repeats`` runs, after two that warm up; ``prepare`` is not timed."""
    times = []
    for index in range(-2, repeats):
        if prepare is not None:
            prepare(index)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if index >= 0:
            times.append(start.elapsed_time(stop) / 1e3)
    return times


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``run`` as a graph; it is run once before, so that everything is compiled."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Register ``tensor`` at its exact size, for the life of the process."""
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)))
    return tensor


def host_experts(shape: Shape) -> list[torch.Tensor]:
    """Random weights of one layer, page-aligned and page-locked."""
    experts = []
    for size in (
        (shape.experts, 2 * shape.moe_intermediate, shape.hidden),
        (shape.experts, shape.hidden, shape.moe_intermediate),
    ):
        pages = mmap.mmap(-1, math.prod(size) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        weights = torch.frombuffer(pages, dtype=torch.int16).view(size)
        weights.copy_(torch.randint(-(2**15), 2**15, size, dtype=torch.int16, device=DEVICE))
        experts.append(page_locked(weights).view(torch.bfloat16))
    return experts


def decode_trace(shape: Shape, batch: int, num_steps: int) -> npt.NDArray[np.int32]:
    """Routed ids of a decode, [num_steps, layers, batch, top_k]."""
    config = TraceConfig(
        sessions=batch,
        positions=num_steps,
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        seed=batch,
    )
    return np.ascontiguousarray(routing_trace(config).transpose(2, 0, 1, 3), dtype=np.int32)


def list_copies(state: DeviceState, num_copies: int) -> None:
    """Let layer 0 ask for the first experts, in the upper slots."""
    ids = torch.arange(num_copies, dtype=torch.int32, device=DEVICE)
    state.lists[0, Lists.SOURCE, :num_copies] = ids
    state.lists[0, Lists.TARGET, :num_copies] = state.num_experts - 1 - ids
    state.header[0, Header.NUM_COPIES] = num_copies


def spread_us(times_s: list[float], count: int = 1) -> Row:
    """Median, least and largest of runs that did something ``count`` times, in microseconds for one."""
    us = [seconds * 1e6 / count for seconds in times_s]
    return {"us": statistics.median(us), "us_min": min(us), "us_max": max(us)}


def time_in_graph(gather: Gather, state: DeviceState) -> Row:
    """One launch among several in a graph, where launching costs the host nothing."""
    num_launches = 8
    layer = state.layer(0)

    def run_all() -> None:
        for _ in range(num_launches):
            gather.run(layer)

    return spread_us(event_times_s(captured(run_all).replay, 8), num_launches)


def measure_gather(shape: Shape, experts: list[torch.Tensor], link_bytes_per_s: float) -> list[Row]:
    """Speed of the gather kernel by its launch, and by how many experts are missing."""
    state = DeviceState(1, shape.experts, shape.experts, DEVICE)
    slots = [torch.empty_like(weights, device=DEVICE) for weights in experts]
    launches = [(programs, 32, 8) for programs in (4, 8, 16, 32, 64)]
    launches += [(16, 16, 8), (16, 64, 8), (16, 32, 4), (16, 32, 16)]
    rows = []
    for programs, chunk_kib, warps in launches:
        gather = Gather(experts, slots, DEVICE, chunk_bytes=chunk_kib << 10, num_programs=programs, num_warps=warps)
        for num_copies in (1, 2, 4, 16) if (chunk_kib, warps) == (32, 8) else (2, 16):
            list_copies(state, num_copies)
            timing = time_in_graph(gather, state)
            speed = num_copies * gather.row_bytes / (timing["us"] / 1e6)
            rows.append(
                {
                    "measure": "gather",
                    "num_programs": programs,
                    "chunk_kib": chunk_kib,
                    "num_warps": warps,
                    "num_copies": num_copies,
                    **timing,
                    "bytes_per_s": speed,
                    "of_link": speed / link_bytes_per_s,
                }
            )
    for programs in (32, 132, 528):
        move = Gather(slots, slots, DEVICE, num_programs=programs)
        list_copies(state, 32)
        timing = time_in_graph(move, state)
        speed = 32 * move.row_bytes / (timing["us"] / 1e6)
        rows.append({"measure": "move", "num_programs": programs, "num_copies": 32, **timing, "bytes_per_s": speed})
    return rows


def measure_plan(shape: Shape) -> list[Row]:
    """Microseconds per layer of the plan alone, and of plan and gather when nothing is missing, inside a graph."""
    rows = []
    for num_experts in (shape.experts, 512):
        for batch in (1, 4, 8, 32):
            for warps in (2, 4, 8):
                for cap in (num_experts, num_experts // 4):
                    rows.append(_plan_row(shape, num_experts, batch, warps, cap))
    return rows


def _plan_row(shape: Shape, num_experts: int, batch: int, warps: int, cap: int) -> Row:
    state = DeviceState(shape.layers, num_experts, cap, DEVICE)
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random((2, shape.layers, batch, num_experts)), axis=-1)[..., : shape.top_k]
    ids = torch.from_numpy(np.ascontiguousarray(order, dtype=np.int32)).to(DEVICE)
    slot_ids = torch.empty_like(ids)
    tiny = torch.zeros(num_experts, 16, dtype=torch.uint8, device=DEVICE)
    gather = Gather([tiny], [tiny.clone()], DEVICE)

    def plan_all(with_gather: bool) -> None:
        for turn in range(2):  # two inputs in turn, so that a small cap misses each time
            for index in range(shape.layers):
                layer = state.layer(index)
                plan_step(
                    layer,
                    ids[turn, index],
                    slot_ids[turn, index],
                    state.num_valid_rows,
                    gather=gather if with_gather else None,
                    num_warps=warps,
                )

    plans = 2 * shape.layers
    row: Row = {"measure": "plan", "num_experts": num_experts, "batch": batch, "num_warps": warps, "cap": cap}
    row |= spread_us(event_times_s(captured(lambda: plan_all(False)).replay, 10), plans)
    if cap == num_experts:
        both = spread_us(event_times_s(captured(lambda: plan_all(True)).replay, 10), plans)
        row |= {f"with_empty_gather_{name}": value for name, value in both.items()}
    return row


def measure_steps(shape: Shape, experts: list[torch.Tensor], link_bytes_per_s: float) -> list[Row]:
    """Whole paging of decode steps in one graph, all layers, against missed bytes over the link."""
    rows = []
    for batch, cap in ((1, 16), (1, 32), (1, 64), (4, 32), (4, 64), (8, 64), (1, shape.experts)):
        slots = [[torch.empty_like(w[:cap], device=DEVICE) for w in experts] for _ in range(shape.layers)]
        state = DeviceState(shape.layers, shape.experts, cap, DEVICE)
        layers = [state.layer(index) for index in range(shape.layers)]
        gathers = [Gather(experts, layer_slots, DEVICE) for layer_slots in slots]
        trace = torch.from_numpy(decode_trace(shape, batch, 102)).to(DEVICE)
        ids = trace[0].clone()
        slot_ids = torch.empty_like(ids)

        def page_all(
            state: DeviceState = state,
            layers: list[Any] = layers,
            gathers: list[Gather] = gathers,
            ids: torch.Tensor = ids,
            slot_ids: torch.Tensor = slot_ids,
        ) -> None:
            for index, layer in enumerate(layers):
                plan_step(layer, ids[index], slot_ids[index], state.num_valid_rows, gather=gathers[index])

        graph = captured(page_all)
        for step in range(40):
            ids.copy_(trace[step])
            graph.replay()
        state.reset_statistics()
        times = event_times_s(graph.replay, 60, lambda i, ids=ids, trace=trace: ids.copy_(trace[42 + i]))  # type: ignore[misc]
        missed_bytes = int(state.counts[:, 0, 4].sum()) / 62 * gathers[0].row_bytes
        mean_s = statistics.fmean(times)
        rows.append(
            {
                "measure": "paging step",
                "batch": batch,
                "cap": cap,
                "ms_per_step": mean_s * 1e3,
                "missed_bytes_per_step": missed_bytes,
                "stretch": mean_s / (missed_bytes / link_bytes_per_s) if missed_bytes else None,
                "overflow": int(state.counts[:, 0, 5].sum()),
            }
        )
        del slots, gathers, graph
    return rows


def measure_resize(shape: Shape) -> list[Row]:
    """Wall time of moving 512 MiB between two regions, by page size, and device time of planning a cap change."""
    rows: list[Row] = []
    for page_granules in (1, 2, 4):
        for has_filler in (False, True):
            rows += _move_rows(CudaBacking(DEVICE, has_filler=has_filler, page_granules=page_granules), has_filler)
    state = DeviceState(shape.layers, shape.experts, 64, DEVICE)
    rows.append(
        {"measure": "plan of a cap change, all layers", **spread_us(event_times_s(lambda: set_cap(state, 32), 10))}
    )
    return rows


def _move_rows(backing: CudaBacking, has_filler: bool) -> list[Row]:
    """There and back, three times."""
    rows: list[Row] = []
    num_bytes = 512 << 20
    start_s = time.perf_counter()
    regions = [backing.reserve(name, 8 << 30) for name in ("experts", "kv")]
    reserve_s = (time.perf_counter() - start_s) / 2
    regions[0].back([(0, num_bytes)])
    for turn in range(6):
        giver, taker = regions[turn % 2], regions[(turn + 1) % 2]
        start_s = time.perf_counter()
        giver.release([(0, num_bytes)])
        released_s = time.perf_counter()
        taker.back([(0, num_bytes)])
        stop_s = time.perf_counter()
        row = {"measure": "move pages", "page_bytes": backing.page_bytes, "pages": num_bytes // backing.page_bytes}
        row |= {"has_filler": has_filler, "reserve_8_gib_ms": reserve_s * 1e3}
        rows.append(row | {"release_ms": (released_s - start_s) * 1e3, "back_ms": (stop_s - released_s) * 1e3})
    del regions, giver, taker
    backing.trim()
    return rows


def summarize(rows: list[Row], link_bytes_per_s: float) -> Row:
    """The figures that matter most, at the launches that the product uses."""
    gathers = [row for row in rows if row["measure"] == "gather"]
    best = max(gathers, key=lambda row: row["bytes_per_s"])
    plans = {
        (row["num_experts"], row["batch"]): row for row in rows if row["measure"] == "plan" and row["num_warps"] == 4
    }
    moves: dict[int, list[float]] = {}
    for row in rows:
        if row["measure"] == "move pages" and not row["has_filler"]:
            moves.setdefault(row["page_bytes"], []).append(row["release_ms"] + row["back_ms"])
    return {
        "link_gb_per_s": link_bytes_per_s / 1e9,
        "best_gather_gb_per_s": best["bytes_per_s"] / 1e9,
        "plan_us_by_experts_and_batch": [(*key, row["us"]) for key, row in plans.items()],
        "stretch_by_batch_and_cap": [
            (row["batch"], row["cap"], row["stretch"]) for row in rows if row["measure"] == "paging step"
        ],
        "median_move_512_mib_ms_by_page_bytes": {size: statistics.median(ms) for size, ms in moves.items()},
    }


def main() -> None:
    """Measure, write the results file, end with one JSON line."""
    parser = argparse.ArgumentParser(description="What paging itself costs on this GPU.")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--output", type=FilePath, required=True)
    args = parser.parse_args()
    shape = SHAPES[args.model]
    torch.manual_seed(0)
    experts = host_experts(shape)
    link_bytes_per_s, _ = measure_link_bytes_per_s()
    rows = measure_resize(shape) + measure_gather(shape, experts, link_bytes_per_s) + measure_plan(shape)
    rows += measure_steps(shape, experts, link_bytes_per_s)
    measured_on = facts()
    result = {
        "benchmark": "pager-overhead",
        "hardware": measured_on["hardware"] | {"link_bytes_per_s": link_bytes_per_s},
        "versions": measured_on["versions"],
        "command": typed_command("python -m loadtests.bench.child.pager_overhead"),
        "config": {"model": args.model, **asdict(shape)},
        "rows": rows,
        "summary": summarize(rows, link_bytes_per_s),
    }
    write_content(args.output, result)
    print_last_line("pager-overhead", args.output, rows, summarize(rows, link_bytes_per_s))


if __name__ == "__main__":
    main()
