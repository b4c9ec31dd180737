"""A seeded Mixture-of-Experts checkpoint in Hugging Face format that runs anywhere and routes by topic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from wisp_core.errors import ConfigurationError
from wisp_core.tiny_model import tiny_tokenizer
from wisp_core.tiny_model.tiny_weights import Array, TinyWeights

CLASSES = {"qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "olmoe": "OlmoeForCausalLM"}
_HAS_QK_NORM = {"qwen3_moe": True, "mixtral": False, "olmoe": True}
_EXPERT_NAMES = {
    "qwen3_moe": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
    "olmoe": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """Shape and seed of a tiny model. Raises ConfigurationError naming every bad setting."""

    arch: str = "qwen3_moe"
    experts: int = 32
    top_k: int = 4
    layers: int = 4
    hidden: int = 256
    moe_intermediate: int = 256
    topics: int = 8
    words_per_topic: int = 192
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    max_positions: int = 16384
    seed: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        problems = [message for is_bad, message in self._rules() if is_bad]
        if problems:
            raise ConfigurationError("tiny model: " + "; ".join(problems))

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.arch not in CLASSES, f"arch {self.arch!r} is not one of {', '.join(CLASSES)}"
        yield self.dtype not in ("bfloat16", "float32"), f"dtype {self.dtype!r} is not bfloat16 or float32"
        for name in ("experts", "layers", "topics", "words_per_topic", "moe_intermediate", "kv_heads"):
            yield getattr(self, name) < 1, f"{name} must be at least 1"
        yield not 0 < self.top_k <= self.experts, f"top_k {self.top_k} must be between 1 and experts {self.experts}"
        yield self.hidden <= self.topics, f"hidden {self.hidden} must be more than topics {self.topics}"
        yield self.head_dim < self.topics, f"head_dim {self.head_dim} must be at least topics {self.topics}"
        yield self.kv_heads > 0 and self.heads % self.kv_heads != 0, "heads must be a multiple of kv_heads"
        words = self.topics * self.words_per_topic
        limit = tiny_tokenizer.max_topic_words()
        yield words > limit, f"topics x words_per_topic is {words}, at most {limit}"
        is_square = self.heads * self.head_dim == self.hidden
        yield self.arch == "olmoe" and not is_square, "olmoe needs heads x head_dim = hidden"

    @property
    def experts_per_topic(self) -> int:
        """Experts per layer that a topic prefers: twice an equal share, at least top-k."""
        return min(self.experts, max(self.top_k, 2 * -(-self.experts // self.topics)))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return tiny_tokenizer.vocab_size(self.topics, self.words_per_topic)

    @property
    def eos_token_id(self) -> int:
        """Token that ends a turn."""
        return tiny_tokenizer.special_token_id(tiny_tokenizer.TURN_END, self.topics, self.words_per_topic)

    @property
    def pad_token_id(self) -> int:
        """Token that pads."""
        return tiny_tokenizer.special_token_id(tiny_tokenizer.END_OF_TEXT, self.topics, self.words_per_topic)

    def topic_words(self, topic: int) -> list[str]:
        """The words of one topic; each is one token when a space precedes it."""
        return tiny_tokenizer.topic_words(topic, self.words_per_topic)


def write_tiny_model(directory: Path, config: TinyModelConfig) -> None:
    """Write config, weights, tokenizer and chat template into ``directory``; equal configs give equal bytes.

    Raises ConfigurationError when ``directory`` cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be made: {error.strerror}; give another directory") from error
    dtype = getattr(torch, config.dtype)
    tensors = {name: torch.from_numpy(array).to(dtype, copy=True) for name, array in _tensors(config)}
    weights = directory / "model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    _write_json(directory / "config.json", _hf_config(config))
    # safetensors lets nobody else read what it writes; what is made here is no secret.
    weights.chmod((directory / "config.json").stat().st_mode & 0o777)
    generation = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id, "do_sample": True}
    _write_json(directory / "generation_config.json", generation)
    tiny_tokenizer.write_tokenizer(
        directory,
        num_topics=config.topics,
        words_per_topic=config.words_per_topic,
        max_positions=config.max_positions,
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _hf_config(config: TinyModelConfig) -> dict[str, Any]:
    is_mixtral = config.arch == "mixtral"
    return {
        "architectures": [CLASSES[config.arch]],
        "model_type": config.arch,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.moe_intermediate,
        "moe_intermediate_size": config.moe_intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        ("num_local_experts" if is_mixtral else "num_experts"): config.experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": None,
        "dtype": config.dtype,
    }


def _tensors(config: TinyModelConfig) -> Iterator[tuple[str, Array]]:
    weights = TinyWeights(config)
    ones = np.ones(config.hidden, dtype=np.float32)
    yield "model.embed_tokens.weight", weights.embedding()
    yield "model.norm.weight", ones
    yield "lm_head.weight", weights.output_head()
    moe = "block_sparse_moe" if config.arch == "mixtral" else "mlp"
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.post_attention_layernorm.weight", ones
        for name, array in weights.attention(layer).items():
            yield f"{prefix}.self_attn.{name}_proj.weight", array
        if _HAS_QK_NORM[config.arch]:
            size = config.hidden if config.arch == "olmoe" else config.head_dim
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{name}.weight", np.ones(size, dtype=np.float32)
        yield f"{prefix}.{moe}.gate.weight", weights.gate(layer)
        for expert in range(config.experts):
            for name, array in weights.expert(layer, expert).items():
                yield f"{prefix}.{moe}.experts.{expert}.{_EXPERT_NAMES[config.arch][name]}.weight", array
