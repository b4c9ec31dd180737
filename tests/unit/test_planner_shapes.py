"""Sizes read from configs of several families and quantizations, against numbers computed by hand."""

from typing import Any

import pytest

from loadtests.shapes import SHAPES, config_of
from wisp_core.errors import ConfigurationError, UnsupportedModelError
from wisp_core.planner.cards import CARDS, card_named, find_card
from wisp_core.planner.model_shape import read_shape
from wisp_core.planner.quantization import Quantization

QWEN3_30B = config_of(SHAPES["qwen3-30b-a3b"])
MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_qwen3_30b_in_bf16() -> None:
    shape = read_shape(QWEN3_30B, name="qwen3")
    assert shape.expert_parameter_bytes == (2 * 768 * 2048 * 2, 2048 * 768 * 2)
    assert shape.experts_bytes == 48 * 128 * 3 * 768 * 2048 * 2
    assert shape.kv_token_bytes == 48 * 2 * 4 * 128 * 2
    attention = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048 + 2 * 128
    layer = attention + 2 * 2048 + 128 * 2048
    assert shape.dense_bytes == 2 * (48 * layer + 2 * 151936 * 2048 + 2048 + 40960 * 128) + 48 * 16


def test_mixtral_has_experts_in_every_layer_and_no_width_of_their_own() -> None:
    shape = read_shape(MIXTRAL, name="mixtral")
    assert (shape.num_moe_layers, shape.num_experts, shape.top_k) == (32, 8, 2)
    # The published model has 46.7 billion parameters, 45.1 of them in experts.
    assert shape.experts_bytes / 2e9 == pytest.approx(45.1, abs=0.1)
    assert (shape.experts_bytes + shape.dense_bytes) / 2e9 == pytest.approx(46.7, abs=0.1)


def test_deepseek_has_latent_attention_shared_experts_and_dense_layers() -> None:
    shape = read_shape(DEEPSEEK_V2_LITE, name="deepseek")
    assert shape.num_moe_layers == 26
    assert shape.kv_token_layer_bytes == (512 + 64) * 2
    # 15.7 billion parameters in all.
    rotary_bytes = 163840 * 64 * 2
    assert (shape.experts_bytes + shape.dense_bytes - rotary_bytes) / 2e9 == pytest.approx(15.7, abs=0.05)


def test_gpt_oss_in_mxfp4_has_scales_and_biases() -> None:
    shape = read_shape(GPT_OSS_20B, name="gpt-oss")
    weights = (2 * 2880 * 2880 // 2, 2880 * 2880 // 2)
    scales = (2 * 2880 * 90, 2880 * 90)
    assert shape.expert_parameter_bytes == (*weights, *scales, 2 * 2880 * 2, 2880 * 2)
    assert shape.has_quantized_experts
    assert shape.has_expert_bias


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (1536 * 2048, 2048 * 768, 12 * 16 * 4, 16 * 6 * 4)),
        ({"quant_method": "fp8"}, (1536 * 2048, 2048 * 768, 1536 * 4, 2048 * 4)),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            (1536 * 1024, 2048 * 384, 1536 * 16 * 2, 1536 * 16 // 2, 2048 * 6 * 2, 2048 * 6 // 2),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
            (1536 * 1024, 2048 * 384, 1536 * 16 * 2, 2048 * 6 * 2),
        ),
        ({"quant_method": "modelopt"}, (1536 * 1024, 2048 * 384, 1536 * 128, 2048 * 48)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {"weights": {"num_bits": 4, "group_size": 32, "type": "int", "symmetric": True}}
                },
            },
            (1536 * 1024, 2048 * 384, 1536 * 64 * 2, 2048 * 24 * 2),
        ),
    ],
)
def test_quantized_experts_and_what_scales_them(config: dict[str, Any], parameters: tuple[int, ...]) -> None:
    shape = read_shape(QWEN3_30B | {"quantization_config": config}, name="quantized")
    assert sorted(shape.expert_parameter_bytes) == sorted(parameters)
    assert shape.dense_bytes < read_shape(QWEN3_30B, name="bf16").dense_bytes


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"mlp_only_layers": [0, 5]}, 46),
        ({"decoder_sparse_step": 2}, 24),
        ({"first_k_dense_replace": 3}, 45),
        ({"interleave_moe_layer_step": 2}, 24),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, 47),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], layers: int) -> None:
    assert read_shape(QWEN3_30B | change, name="some").num_moe_layers == layers


def test_a_multimodal_config_is_read_for_its_language_part() -> None:
    assert read_shape({"model_type": "vl", "text_config": QWEN3_30B}, name="vl") == read_shape(QWEN3_30B, name="vl")


def test_the_engine_s_dtypes_count() -> None:
    assert (
        read_shape(QWEN3_30B, name="x", dtype="float32").expert_bytes
        == 2 * read_shape(QWEN3_30B, name="x").expert_bytes
    )
    fp8 = read_shape(QWEN3_30B, name="x", kv_dtype="fp8_e4m3")
    assert 2 * fp8.kv_token_bytes == read_shape(QWEN3_30B, name="x").kv_token_bytes


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"num_hidden_layers": 2}, UnsupportedModelError, "no experts to page"),
        (QWEN3_30B | {"linear_num_key_heads": 16}, UnsupportedModelError, "hybrid"),
        ({k: v for k, v in QWEN3_30B.items() if k != "num_experts_per_tok"}, ConfigurationError, "num_experts_per_tok"),
        (QWEN3_30B | {"quantization_config": {"quant_method": "zip"}}, UnsupportedModelError, "zip"),
        (QWEN3_30B | {"dtype": "int3"}, ConfigurationError, "int3"),
    ],
)
def test_what_is_missing_or_unknown_is_named(config: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read_shape(config, name="model")


def test_cards_have_sane_sizes_and_names_are_told() -> None:
    for card in CARDS.values():
        assert 10e9 < card.memory_bytes < 200e9
        assert 5e9 < card.link_bytes_per_s < card.memory_bytes_per_s / 5
        assert card.source
    assert find_card("RTX-4090").link == "PCIe 4.0 x16"
    with pytest.raises(ConfigurationError, match="rtx-3090"):
        find_card("voodoo")
    assert find_card("l4").with_link(20e9).link_bytes_per_s == 20e9


@pytest.mark.parametrize(
    ("config", "are_quantized"),
    [
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head", "model.layers.0.mlp.experts"]}, True),
        ({"quant_method": "awq", "modules_to_not_convert": ["mlp.shared_experts", "mlp.gate"]}, True),
        ({"quant_method": "fp8", "ignored_layers": ["re:.*mlp.experts.*"]}, False),
    ],
)
def test_experts_that_every_layer_leaves_alone_are_not_quantized(config: dict[str, Any], are_quantized: bool) -> None:
    plain = read_shape(QWEN3_30B, name="bf16")
    shape = read_shape(QWEN3_30B | {"quantization_config": config}, name="quantized")
    assert shape.has_quantized_experts is are_quantized
    assert (shape.expert_bytes < plain.expert_bytes) is are_quantized
    assert shape.dense_bytes < plain.dense_bytes
    assert not plain.has_quantized_experts


def test_no_quantization_is_a_quantization() -> None:
    assert Quantization.read(None).expert_parameter_bytes(4, 8, 2) == (2 * 8 * 4 * 2, 4 * 8 * 2)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_a_driver_s_name_finds_its_profile(product: str, name: str) -> None:
    card = card_named(product)
    assert card is not None
    assert card.name == name


def test_a_name_without_a_profile_finds_none() -> None:
    assert card_named("NVIDIA A100-SXM4-80GB") is None
    assert card_named("NVIDIA RTX 6000 Ada Generation") is None
