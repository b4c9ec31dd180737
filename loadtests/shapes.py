"""Named model shapes: a config and a tokenizer without weights, for benchmarks that make up the weights.

Time and bytes of paging depend on a model's shape, not on what its weights say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wisp_core.tiny_model import tiny_tokenizer

_TOPICS, _WORDS_PER_TOPIC = 8, 192  # of the tokenizer that stands in for the model's own
TOKENIZER_VOCAB_SIZE = tiny_tokenizer.vocab_size(_TOPICS, _WORDS_PER_TOPIC)
"""Ids that this tokenizer has words for."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3-MoE model; field names follow its Hugging Face config where they can."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    moe_intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 40960
    dtype: str = "bfloat16"


QWEN3_30B_A3B = Shape(
    layers=48,
    experts=128,
    top_k=8,
    hidden=2048,
    moe_intermediate=768,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab_size=151936,
)

SHAPES = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    # The same layers, fewer of them: every per-layer figure holds, a run takes less time and memory.
    "qwen3-30b-a3b-12-layers": Shape(**{**QWEN3_30B_A3B.__dict__, "layers": 12}),
    "qwen3-30b-a3b-4-layers": Shape(**{**QWEN3_30B_A3B.__dict__, "layers": 4}),
    "tiny": Shape(
        layers=4,
        experts=32,
        top_k=4,
        hidden=256,
        moe_intermediate=256,
        heads=4,
        kv_heads=4,
        head_dim=64,
        vocab_size=2048,
    ),
}


def write_shape(directory: Path, shape: Shape) -> None:
    """Write config.json and a small tokenizer; without weights, so load it with made-up ones."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(shape), indent=2, sort_keys=True) + "\n")
    tiny_tokenizer.write_tokenizer(
        directory, num_topics=_TOPICS, words_per_topic=_WORDS_PER_TOPIC, max_positions=shape.max_positions
    )


def config_of(shape: Shape) -> dict[str, Any]:
    """``shape`` as a Hugging Face config.json."""
    eos = tiny_tokenizer.special_token_id(tiny_tokenizer.TURN_END, _TOPICS, _WORDS_PER_TOPIC)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.moe_intermediate,
        "moe_intermediate_size": shape.moe_intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": eos,
        "bos_token_id": None,
        "dtype": shape.dtype,
    }
