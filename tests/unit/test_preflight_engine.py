"""What cannot start by config.json or by vLLM's own source is refused before an engine is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.config import ModelSettings, PolicySettings, ReplicaSettings
from services.preflight_engine import argument_types, check_engine
from wisp_core.errors import ConfigurationError
from wisp_core.planner.model_shape import ModelShape, read_shape
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

MB = 1 << 20
KV_TOKENS = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, TinyModelConfig(layers=2, experts=8, moe_intermediate=128, max_positions=2048))
    return directory


@pytest.fixture
def shape(model: Path) -> ModelShape:
    return read_shape(json.loads((model / "config.json").read_text()), name="tiny")


def check(
    model: Path, engine: dict[str, Any] | None = None, policy: PolicySettings | None = None, **replica: Any
) -> None:
    settings = {"vram_budget_bytes": 1 << 30, "engine": {"max_model_len": KV_TOKENS, **(engine or {})}, **replica}
    check_engine(ModelSettings(path=str(model)), ReplicaSettings.model_validate(settings), policy or PolicySettings())


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"initial_cap": 2}, "replica.initial_cap: 2 slots"), ({"initial_cap": 4, "min_cap": 3}, "replica.min_cap: 3")],
)
def test_a_cap_that_the_model_cannot_have_is_named(model: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named + ".*give 4 to 8"):
        check(model, **settings)
    check(model, initial_cap=8, min_cap=4)


def test_a_static_split_s_cap_that_the_model_cannot_have_is_named(model: Path) -> None:
    for cap in (3, 9):
        with pytest.raises(ConfigurationError, match=rf"^policy\.settings\.cap: {cap} slots.*give 4 to 8"):
            check(model, policy=PolicySettings(name="static_split", settings={"cap": cap}))
    check(model, policy=PolicySettings(name="static_split", settings={"cap": 8}))
    check(model, policy=PolicySettings(name="mine:Own", settings={"cap": 9}))


def test_what_is_for_the_other_kind_of_device_is_refused(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"replica\.prefetch is for GPUs"):
        check(model, prefetch=2)
    with pytest.raises(ConfigurationError, match=r"replica\.emulated_link_bytes_per_s is for the CPU"):
        check(model, emulated_link_bytes_per_s=1e9, num_gpus=1)
    check(model, prefetch=2, num_gpus=1)
    check(model, emulated_link_bytes_per_s=1e9)


def test_arguments_that_cannot_go_with_paging_are_all_named(model: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(model, {"tensor_parallel_size": 2, "enable_lora": True, "dtype": "bf17", "cpu_offload_gb": 4})
    for line in ("tensor_parallel_size: 2 is untested", "enable_lora: adapters", "cpu_offload_gb: paging"):
        assert f"replica.engine.{line}" in str(caught.value)
    assert "replica.engine.dtype: vLLM has no 'bf17'; it has auto, " in str(caught.value)
    check(model, {"tensor_parallel_size": 1, "enable_lora": False, "dtype": "float32", "cpu_offload_gb": 0})


def test_arguments_that_vllm_does_not_have_are_all_named(model: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(model, {"max_num_seq": 4, "block-size": 16, "colour": "red"})
    for line in ("max_num_seq: unknown to vLLM; did you mean max_num_seqs?", "did you mean block_size?", "colour"):
        assert line in str(caught.value)


def test_arguments_of_engine_and_frontend_are_known() -> None:
    known = {"max_model_len", "max_num_batched_tokens", "block_size", "dtype", "kv_cache_dtype", "load_format"}
    assert known | {"enable_auto_tool_choice", "tool_call_parser", "chat_template"} <= argument_types().keys()


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"max_num_seqs": "many"}, "takes a whole number, not 'many'"),
        ({"max_num_seqs": 1.5}, "takes a whole number, not 1.5"),
        ({"max_num_seqs": [4]}, r"takes a whole number, not \[4\]"),
        ({"max_num_batched_tokens": "8k"}, "takes a whole number, not '8k'"),
        ({"max_model_len": "auto"}, "takes a whole number, not 'auto'"),
        ({"max_model_len": "32k"}, "takes a whole number, not '32k'"),
        ({"max_model_len": 0}, "takes 1 token or more, or -1 for as many as fit, not 0"),
        ({"max_model_len": -2}, "takes 1 token or more, or -1 for as many as fit, not -2"),
        ({"block_size": True}, "takes a whole number, not True"),
        ({"watermark": "high"}, "takes a number, not 'high'"),
        ({"enforce_eager": "maybe"}, "takes true or false, not 'maybe'"),
        ({"tool_call_parser": "hermess"}, "vLLM has no 'hermess'; did you mean hermes"),
        ({"tool_call_parser": "nosuch"}, "vLLM has no 'nosuch'; it has .*, hermes, "),
        ({"reasoning_parser": "nosuch"}, "vLLM has no 'nosuch'; it has .*qwen3"),
    ],
)
def test_a_value_that_an_argument_cannot_have_is_refused_by_its_name(
    model: Path, engine: dict[str, Any], problem: str
) -> None:
    (name,) = engine
    with pytest.raises(ConfigurationError, match=rf"^replica\.engine\.{name}: {problem}"):
        check(model, engine)


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_seqs": 4, "block_size": 16, "watermark": "1e-2", "enforce_eager": True, "seed": None},
        {"max_num_batched_tokens": 8192, "max_model_len": -1, "dtype": "bfloat16"},
        {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
        {"tool_call_parser": "mine", "tool_parser_plugin": "mine.py"},
    ],
)
def test_values_that_vllm_may_take_are_left_to_it(model: Path, engine: dict[str, Any]) -> None:
    check(model, engine)


def test_a_context_longer_than_the_model_s_is_named(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_model_len: 4096 tokens.*positions for 2048"):
        check(model, {"max_model_len": 4096})
    check(model, {"max_model_len": 2048})
    check(model, {"max_model_len": 4096}, env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})


def test_a_budget_below_the_smallest_pools_is_refused_with_one_that_is_not(model: Path, shape: ModelShape) -> None:
    slot_bytes, kv_bytes = shape.num_moe_layers * shape.expert_bytes, KV_TOKENS * shape.kv_token_bytes
    fixed: dict[str, Any] = {"other_bytes": 4 * MB}
    least_bytes = 4 * MB + shape.top_k * slot_bytes + kv_bytes
    with pytest.raises(
        ConfigurationError, match=rf"vram_budget_bytes: {least_bytes - 1} is too.*give {least_bytes} or more \(\d+ MB\)"
    ):
        check(model, vram_budget_bytes=least_bytes - 1, **fixed)
    check(model, vram_budget_bytes=least_bytes, **fixed)
    with pytest.raises(ConfigurationError, match=r"lower replica\.initial_cap to 4 or less"):
        check(model, vram_budget_bytes=least_bytes, initial_cap=8, **fixed)
    with pytest.raises(ConfigurationError, match=r"of dense weights, 0 of activation_bytes"):
        check(model, vram_budget_bytes=least_bytes - 4 * MB, activation_bytes=0)


def test_other_bytes_below_the_dense_weights_are_refused(model: Path, shape: ModelShape) -> None:
    with pytest.raises(ConfigurationError, match=rf"^replica\.other_bytes: 1000 .* {shape.dense_bytes}: leave it out"):
        check(model, other_bytes=1000)
    check(model, other_bytes=shape.dense_bytes)


def test_a_shorter_context_is_named_only_where_it_helps(model: Path, shape: ModelShape) -> None:
    without_kv_bytes = 4 * MB + shape.top_k * shape.num_moe_layers * shape.expert_bytes
    for budget_bytes, helps in ((without_kv_bytes + 1, True), (without_kv_bytes, False)):
        with pytest.raises(ConfigurationError, match=r"or more") as caught:
            check(model, vram_budget_bytes=budget_bytes, other_bytes=4 * MB)
        assert ("lower replica.engine.max_model_len" in str(caught.value)) is helps


def test_a_model_without_experts_is_refused_beforehand(tmp_path: Path) -> None:
    dense = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    with pytest.raises(ConfigurationError, match=r"model\.path: .*no experts to page"):
        check(tmp_path)
    for known_otherwise in ({"number_of_experts": 8}, {"model_type": "new_moe"}):
        (tmp_path / "config.json").write_text(json.dumps(dense | known_otherwise))
        check(tmp_path)


def test_what_only_vllm_may_know_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    check(tmp_path, vram_budget_bytes=1000, initial_cap=2)
    check(Path("org/some-model-on-the-hub"), vram_budget_bytes=1000)


@pytest.mark.parametrize(
    ("config", "engine", "num_gpus", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, 0, "quantization by fp8.*unquantized checkpoint"),
        ({}, {"quantization": "fp8"}, 0, "quantization by fp8.*no --quantization"),
        ({"num_experts": 512}, {}, 1, "512 experts per layer: at most 495"),
        ({"model_type": "gpt_oss"}, {}, 1, "experts with biases"),
    ],
)
def test_experts_that_no_engine_pages_are_refused_beforehand(
    model: Path, tmp_path: Path, config: dict[str, Any], engine: dict[str, Any], num_gpus: int, named: str
) -> None:
    plain = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(plain | config))
    with pytest.raises(ConfigurationError, match=rf"(model\.path|engine\.quantization): .*cannot be paged: .*{named}"):
        check(tmp_path, engine, num_gpus=num_gpus)


def test_a_checkpoint_whose_experts_are_left_as_they_are_may_start(model: Path, tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:.*mlp.experts.*"]}}
    plain = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(plain | quantized))
    check(tmp_path, {"quantization": "fp8"})
