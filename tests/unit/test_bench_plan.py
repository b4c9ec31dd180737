"""What each mode asks of vLLM, and which engines a run needs."""

import dataclasses
from pathlib import Path

import pytest

from loadtests.bench import configs
from loadtests.bench.job import JOB, BudgetJob, DecodeJob, IdentityJob, LatencyJob, OnlineJob, PrefillJob, ResizeJob
from loadtests.bench.modes import BASELINES, Mode, layer_parameter_bytes, mode_arguments
from loadtests.bench.online.in_process import in_process_cpu, in_process_h200
from loadtests.bench.plan import (
    budget_jobs,
    decode_jobs,
    find_model,
    identity_jobs,
    latency_jobs,
    online_jobs,
    prefill_jobs,
    resize_jobs,
)
from loadtests.shapes import SHAPES, config_of
from wisp_core.errors import ConfigurationError
from wisp_core.planner.model_shape import read_shape

SHAPE = read_shape(config_of(SHAPES["qwen3-30b-a3b"]), name="qwen3-30b-a3b")
W13_BYTES, W2_BYTES = layer_parameter_bytes(SHAPE)
GIB = 1 << 30


@pytest.mark.parametrize("cap", [16, 32, 64, 96])
@pytest.mark.parametrize("mode", [Mode.UVA_EXPERTS, Mode.UVA_ALL])
def test_uva_keeps_no_less_on_the_device_than_the_pager(mode: Mode, cap: int) -> None:
    offload_bytes = mode_arguments(mode, SHAPE, cap).engine_args["cpu_offload_gb"] * GIB
    paged_bytes = SHAPE.num_moe_layers * (SHAPE.num_experts - cap) * SHAPE.expert_bytes
    slack = W13_BYTES + (W13_BYTES if mode is Mode.UVA_ALL else 0)
    # vLLM stops after the parameter with which it reaches the limit, so `uva_all` may go over by one.
    over = W13_BYTES if mode is Mode.UVA_ALL else 0
    assert paged_bytes - slack <= offload_bytes + over
    assert offload_bytes + over <= paged_bytes


def test_uva_of_experts_offloads_whole_parameters() -> None:
    arguments = mode_arguments(Mode.UVA_EXPERTS, SHAPE, 32).engine_args
    assert arguments["cpu_offload_params"] == ["experts"]
    # 36 of 48 layers: 25 % of the experts stay, exactly.
    assert int(arguments["cpu_offload_gb"] * GIB) == 36 * (W13_BYTES + W2_BYTES)


def test_the_copying_offloader_pays_for_the_layer_in_flight() -> None:
    uva, copying = (mode_arguments(mode, SHAPE, 32) for mode in (Mode.UVA_EXPERTS, Mode.OFFLOAD_COPY))
    more = copying.engine_args["cpu_offload_gb"] - uva.engine_args["cpu_offload_gb"]
    assert more * GIB == W13_BYTES + W2_BYTES
    assert copying.env == {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}


def test_prefetch_counts_its_buffer_as_resident() -> None:
    arguments = mode_arguments(Mode.PREFETCH_OFFLOAD, SHAPE, 32).engine_args
    resident_layers = SHAPE.num_moe_layers - arguments["offload_num_in_group"] + arguments["offload_prefetch_step"]
    assert arguments["offload_group_size"] == SHAPE.num_moe_layers
    assert resident_layers == 12


@pytest.mark.parametrize("mode", BASELINES)
def test_a_baseline_with_every_expert_is_refused(mode: Mode) -> None:
    with pytest.raises(ValueError, match="nothing to offload"):
        mode_arguments(mode, SHAPE, SHAPE.num_experts)


def test_a_decode_run_is_resident_then_paged_then_baselines(tmp_path: Path) -> None:
    config = configs.decode_h200()
    jobs = decode_jobs(config, find_model("qwen3-30b-a3b", tmp_path))
    names = [name for name, _ in jobs]
    assert names[:2] == ["resident-128", "paged-16"]
    assert len(jobs) == 2 + len(config.baselines)
    decode = [job for _, job in jobs if isinstance(job, DecodeJob)]
    assert decode[1].caps == (16, 32, 64, 96, 128)
    assert decode[1].engine.engine_args["additional_config"] == {
        "wisp": {"cap": 16, "min_cap": 16, "bypass_if_it_fits": False}
    }
    # Nothing but the mode's own arguments differs.
    own = {"additional_config", "cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_params"}
    own |= {"offload_group_size", "offload_num_in_group", "offload_prefetch_step"}
    common = [{k: v for k, v in job.engine.engine_args.items() if k not in own} for job in decode]
    assert all(arguments == common[0] for arguments in common)
    assert len({job.engine.trace for job in decode}) == 1
    assert [job.engine.must_offload for job in decode] == [False, False] + [True] * len(config.baselines)


def test_a_prefill_run_has_an_engine_for_each_mode_with_room_for_every_chunk(tmp_path: Path) -> None:
    config = configs.prefill_h200()
    jobs = [job for _, job in prefill_jobs(config, find_model("tiny", tmp_path)) if isinstance(job, PrefillJob)]
    assert len(jobs) == len(config.modes)
    assert {job.chunk_tokens for job in jobs} == {(2048, 8192)}
    assert {job.engine.engine_args["max_num_batched_tokens"] for job in jobs} == {8192}
    assert all(job.engine.engine_args["max_model_len"] == 8002 for job in jobs)


def test_a_latency_run_times_prompts_once_for_each_mode_in_the_decode_run_s_engines(tmp_path: Path) -> None:
    decode, prefill = configs.decode_h200(), configs.prefill_h200()
    jobs = latency_jobs(decode, prefill, find_model("qwen3-30b-a3b", tmp_path))
    latency = [job for _, job in jobs if isinstance(job, LatencyJob)]
    assert len(latency) == 2 + len(decode.baselines)
    assert sorted(job.engine.mode for job in latency if job.prefill is not None) == sorted(prefill.modes)
    for job in latency:
        assert job.engine.engine_args["max_num_batched_tokens"] == 8192
        assert job.engine.engine_args["kv_cache_memory_bytes"] == prefill.engine.kv_bytes
        assert job.prefill is None or job.engine.mode == "resident" or job.prefill.cap in job.decode.caps
    assert len({job.engine.trace for job in latency}) == 1


def test_an_identity_run_asks_the_same_of_every_engine(tmp_path: Path) -> None:
    config = configs.identity_h200()
    jobs = [job for _, job in identity_jobs(config, find_model("qwen3-30b-a3b-4-layers", tmp_path))]
    identity = [job for job in jobs if isinstance(job, IdentityJob)]
    assert [(job.engine.mode, "enforce_eager" in job.engine.engine_args) for job in identity] == [
        ("resident", False),
        ("paged", False),
        ("resident", True),
        ("paged", True),
        ("paged", False),
    ]
    (batches,) = {job.batches for job in identity}
    assert {len(lengths) for lengths in batches} == set(range(1, 9))
    assert sum(map(len, batches)) >= 100
    assert {length for lengths in batches for length in lengths} == set(config.prompt_tokens)
    assert len({job.engine.engine_args["max_num_batched_tokens"] for job in identity}) == 1


def test_a_budget_run_has_an_engine_for_each_budget(tmp_path: Path) -> None:
    jobs = budget_jobs(configs.budget_h200(), find_model("qwen3-30b-a3b", tmp_path))
    budgets = [job.engine.wisp["vram_budget_bytes"] for _, job in jobs if isinstance(job, BudgetJob)]
    assert sorted(budgets) == [12 * 10**9, 16 * 10**9, 24 * 10**9, 48 * 10**9]
    assert len({name for name, _ in jobs}) == 4
    for _, job in jobs:
        assert isinstance(job, BudgetJob)
        assert "max_num_batched_tokens" not in job.engine.engine_args, "the product chooses the tokens of a pass"
        assert job.engine.engine_args["max_model_len"] > max(job.prefill.prompt_tokens)
        assert job.engine.trace is not None


def test_a_resize_run_leaves_the_memory_to_wisp(tmp_path: Path) -> None:
    ((_, job),) = resize_jobs(configs.resize_cpu(), find_model("tiny", tmp_path))
    assert isinstance(job, ResizeJob)
    assert job.engine.wisp == {"vram_budget_bytes": 128 << 20, "bypass_if_it_fits": False}
    assert "kv_cache_memory_bytes" not in job.engine.engine_args


def test_an_online_run_asks_the_policy_first_and_replays_every_context_of_the_30b_shape(tmp_path: Path) -> None:
    config = in_process_h200()
    ((_, job),) = online_jobs(config, find_model("qwen3-30b-a3b", tmp_path))
    assert isinstance(job, OnlineJob)
    assert job.ways == (None, *config.caps)
    assert job.engine.wisp["vram_budget_bytes"] == 24 * 10**9
    assert job.engine.timeout_s > 5 * config.deadline_s
    assert job.engine.trace is not None
    assert (job.engine.trace.layers, job.engine.trace.sessions) == (48, config.num_topics)
    sizes = job.engine.engine_args["compilation_config"]["cudagraph_capture_sizes"]  # type: ignore[index]
    assert sizes == list(range(1, 9)), "a padded row would replay what belongs to no request"
    none = dataclasses.replace(in_process_cpu(), policy="none")
    ((_, job),) = online_jobs(none, find_model("tiny", tmp_path))
    assert isinstance(job, OnlineJob)
    assert (job.ways, job.engine.trace) == (none.caps, None)
    assert JOB.validate_json(job.model_dump_json()) == job


def test_real_routing_has_no_trace(tmp_path: Path) -> None:
    config = configs.decode_cpu()
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, routing="real"))
    jobs = [job for _, job in decode_jobs(config, find_model("tiny", tmp_path)) if isinstance(job, DecodeJob)]
    assert {job.engine.trace for job in jobs} == {None}


def test_jobs_survive_json(tmp_path: Path) -> None:
    (_, job), *_ = decode_jobs(configs.decode_cpu(), find_model("tiny", tmp_path))
    assert isinstance(job, DecodeJob)
    assert JOB.validate_json(job.model_dump_json()) == job


def test_a_shape_is_read_back_as_written(tmp_path: Path) -> None:
    model = find_model("tiny", tmp_path)
    assert model.has_made_up_weights
    assert model.shape == read_shape(config_of(SHAPES["tiny"]), name="tiny")
    again = find_model(str(model.directory), tmp_path)
    assert again.has_made_up_weights
    assert dataclasses.replace(again.shape, name="tiny") == model.shape


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json: name a checkpoint, or one of qwen3-30b-a3b"):
        find_model(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigurationError, match="'llama', benchmarks need 'qwen3_moe'"):
        find_model(str(tmp_path), tmp_path)
