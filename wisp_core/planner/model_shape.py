"""Sizes of a Mixture-of-Experts model, read from its own ``config.json``.

Names of the same thing differ between model families; what is not found is an error that names the keys looked for,
never a guess. Dense weights are counted part by part, as vLLM keeps them: vocabularies are padded to 64 rows, and the
table of rotary positions is a tensor too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wisp_core.errors import ConfigurationError, UnsupportedModelError
from wisp_core.planner.quantization import Quantization

_VOCAB_ROWS = 64
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_SCALE_BYTES = 4 * 4  # of each attention layer: of query, key, value and probabilities, float32
_HYBRID_KEYS = (
    "layers_block_type",
    "attn_layer_period",
    "linear_num_key_heads",
    "mamba_d_state",
    "hybrid_override_pattern",
)

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer's attention."""

    weight_elements: int
    small_elements: int
    """Norms and biases, which are never quantized."""
    kv_elements_per_token: int
    """Elements of the KV cache that one token takes in one layer."""
    rotary_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What memory and time depend on; bytes are those on the device."""

    name: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_parameter_bytes: tuple[int, ...]
    """Of one expert of one layer, by parameter."""
    dense_bytes: int
    """Everything that is not paged."""
    dense_read_bytes: int
    """The part of it that every decode step reads."""
    kv_token_layer_bytes: int
    """KV cache of one token in one layer."""
    hidden_size: int
    moe_intermediate: int
    vocab_size: int
    max_positions: int
    dtype: str
    quantization: str
    has_quantized_experts: bool = False
    has_expert_bias: bool = False

    @property
    def expert_bytes(self) -> int:
        """One expert of one layer."""
        return sum(self.expert_parameter_bytes)

    @property
    def experts_bytes(self) -> int:
        """All experts of all layers: what host memory must hold."""
        return self.num_moe_layers * self.num_experts * self.expert_bytes

    @property
    def kv_token_bytes(self) -> int:
        """KV cache of one token over all layers."""
        return self.num_layers * self.kv_token_layer_bytes

    @property
    def active_elements(self) -> int:
        """Weights that one token is multiplied with, about."""
        routed = self.num_moe_layers * self.top_k * 3 * self.hidden_size * self.moe_intermediate
        return routed + self.dense_read_bytes // 2


def read_shape(config: Config, *, name: str, dtype: str | None = None, kv_dtype: str = "auto") -> ModelShape:
    """The shape that ``config`` (a parsed config.json) describes.

    Args:
        config: As Hugging Face keeps it; a multimodal model's language part is taken.
        name: For messages.
        dtype: The engine's ``dtype`` argument; None: the config's own.
        kv_dtype: The engine's ``kv_cache_dtype``.

    Raises:
        UnsupportedModelError: No experts, or layers that paging does not know.
        ConfigurationError: A size is missing.
    """
    text: Config = config.get("text_config") or config
    quantization = Quantization.read(config.get("quantization_config") or text.get("quantization_config"))
    family = _Family(text, name)
    dtype_name = dtype if dtype not in (None, "auto") else _own_dtype(config, text)
    if dtype_name not in _DTYPE_BYTES:
        raise ConfigurationError(f"{name}: dtype {dtype_name!r} is none of {', '.join(_DTYPE_BYTES)}")
    element_bytes = _DTYPE_BYTES[dtype_name]
    attention = family.attention()
    dense = _Dense(family, quantization, element_bytes)
    kv_bytes = 1 if kv_dtype.startswith("fp8") else element_bytes
    has_bias = text.get("model_type") == "gpt_oss"
    return ModelShape(
        name=name,
        num_layers=family.num_layers,
        num_moe_layers=len(family.moe_layers()),
        num_experts=family.num_experts,
        top_k=family.top_k,
        expert_parameter_bytes=quantization.expert_parameter_bytes(
            family.hidden, family.moe_intermediate, element_bytes, has_bias=has_bias
        ),
        dense_bytes=dense.total_bytes(),
        dense_read_bytes=dense.read_bytes(),
        kv_token_layer_bytes=attention.kv_elements_per_token * kv_bytes,
        hidden_size=family.hidden,
        moe_intermediate=family.moe_intermediate,
        vocab_size=family.vocab_size,
        max_positions=int(family.get("max_position_embeddings", "max_seq_len", default=0)) or 0,
        dtype=dtype_name,
        quantization=quantization.name,
        has_quantized_experts=quantization.are_experts_quantized,
        has_expert_bias=has_bias,
    )


def _own_dtype(config: Config, text: Config) -> str:
    found = next((c[key] for c in (text, config) for key in ("dtype", "torch_dtype") if c.get(key)), "bfloat16")
    dtype = str(found).removeprefix("torch.")
    return "bfloat16" if dtype == "float32" and config.get("quantization_config") else dtype


class _Family:
    """Finds a size under the names that model families give it."""

    def __init__(self, config: Config, name: str) -> None:
        hybrid = [key for key in _HYBRID_KEYS if key in config]
        if hybrid:
            raise UnsupportedModelError(
                f"{name}: has layers without a KV cache or of different kinds ({', '.join(hybrid)}); resizing the KV "
                "cache of hybrid models is not supported"
            )
        self.config, self.name = config, name
        experts = (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "ffn_config.moe_num_experts",
        )
        if not self.get(*experts, default=0):
            raise UnsupportedModelError(f"{name}: config.json has none of {', '.join(experts)}: no experts to page")
        self.num_experts = self._int(*experts)
        self.top_k = self._int(
            "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "ffn_config.moe_top_k", "top_k_experts"
        )
        self.num_layers = self._int("num_hidden_layers", "n_layers", "num_layers")
        self.hidden = self._int("hidden_size", "d_model", "n_embd")
        self.heads = self._int("num_attention_heads", "n_heads", "n_head")
        self.vocab_size = self._int("vocab_size")
        self.moe_intermediate = self._int(
            "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size", "intermediate_size"
        )

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of ``names`` that is there and not null; a dot leads into a part."""
        for name in names:
            value: Any = self.config
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return default

    def _int(self, *names: str) -> int:
        value = self.get(*names)
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = value[0] if len(set(value)) == 1 else None
        if not isinstance(value, int | float):
            raise ConfigurationError(f"{self.name}: config.json has no number under {', '.join(names)}")
        return int(value)

    def moe_layers(self) -> list[int]:
        """Which layers have experts."""
        listed = self.get("moe_layers", "moe_layers_enum")
        if isinstance(listed, str):
            listed = [int(part) for part in listed.split(",")]
        if listed:
            return list(listed)
        layers = range(self.num_layers)
        if (start := self.get("moe_layer_start_index")) is not None:
            stop, interval = self.get("moe_layer_end_index"), self.get("moe_layer_interval", default=1)
            stop = self.num_layers - 1 if stop is None or stop < 0 else stop
            return [layer for layer in layers if start <= layer <= stop and (layer + 1) % interval == 0]
        if (step := self.get("interleave_moe_layer_step")) is not None:
            return [layer for layer in layers if (layer + 1) % step == 0]
        if (first := self.get("first_k_dense_replace")) is not None:
            frequency = self.get("moe_layer_freq", default=1)
            return [layer for layer in layers if layer >= first and layer % frequency == 0]
        dense, step = self.get("mlp_only_layers", default=()), self.get("decoder_sparse_step", default=1)
        return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]

    def attention(self) -> Attention:
        """One layer's attention; all are taken to be alike."""
        if (latent := self.get("kv_lora_rank")) is not None:
            return self._latent_attention(int(latent))
        head_dim = int(self.get("head_dim", default=self.hidden // self.heads))
        kv_heads = int(self.get("num_key_value_heads", "attn_config.kv_n_heads", default=self.heads))
        qkv = (self.heads + 2 * kv_heads) * head_dim
        small = 0
        model_type = str(self.get("model_type", default=""))
        if self.get("attention_bias", "qkv_bias", default=model_type == "qwen2_moe"):
            small += qkv
        if model_type in ("qwen3_moe", "glm4_moe") and self.get("use_qk_norm", default=True):
            small += 2 * head_dim
        if model_type == "olmoe":
            small += (self.heads + kv_heads) * head_dim
        return Attention(
            weight_elements=self.hidden * qkv + self.heads * head_dim * self.hidden,
            small_elements=small,
            kv_elements_per_token=2 * kv_heads * head_dim,
            rotary_dim=int(head_dim * float(self.get("partial_rotary_factor", default=1.0))),
        )

    def _latent_attention(self, latent: int) -> Attention:
        rope, nope, value = (self._int(f"{name}_head_dim") for name in ("qk_rope", "qk_nope", "v"))
        query_rank = self.get("q_lora_rank")
        queries = self.heads * (nope + rope)
        query = self.hidden * queries if not query_rank else self.hidden * query_rank + query_rank * queries
        keys = self.hidden * (latent + rope) + latent * self.heads * (nope + value)
        return Attention(
            weight_elements=query + keys + self.heads * value * self.hidden,
            small_elements=latent + int(query_rank or 0),
            kv_elements_per_token=latent + rope,
            rotary_dim=rope,
        )

    def shared_intermediate(self) -> int:
        """Width of the experts that every token uses, together."""
        if (width := self.get("shared_expert_intermediate_size", "shared_intermediate_size")) is not None:
            return int(width)
        if self.get("model_type") == "llama4_text":
            return int(self.get("intermediate_size"))
        return int(self.get("n_shared_experts", "moe_num_shared_experts", default=0) or 0) * self.moe_intermediate

    def dense_intermediate(self) -> int:
        """Width of the layers without experts."""
        return int(self.get("intermediate_size_mlp", "intermediate_size", default=0))


class _Dense:
    """Bytes of what is not paged."""

    def __init__(self, family: _Family, quantization: Quantization, element_bytes: int) -> None:
        self._family, self._quantization, self._element_bytes = family, quantization, element_bytes

    def read_bytes(self) -> int:
        """Layers and output head: what a decode step reads."""
        return self._layers_bytes() + self._vocab_bytes() + self._family.hidden * self._element_bytes

    def total_bytes(self) -> int:
        """All of it: also the input embeddings, unless they are the output's, and the rotary table."""
        family = self._family
        is_tied = bool(family.get("tie_word_embeddings", default=False))
        rotary = int(family.get("max_position_embeddings", default=0)) * family.attention().rotary_dim
        beside = rotary * self._element_bytes + family.num_layers * _SCALE_BYTES
        return self.read_bytes() + (0 if is_tied else self._vocab_bytes()) + beside

    def _vocab_bytes(self) -> int:
        rows = -(-self._family.vocab_size // _VOCAB_ROWS) * _VOCAB_ROWS
        return rows * self._family.hidden * self._element_bytes

    def _layers_bytes(self) -> int:
        family, attention = self._family, self._family.attention()
        num_moe = len(family.moe_layers())
        norms = 2 * family.hidden + attention.small_elements
        linear = family.num_layers * attention.weight_elements
        linear += (family.num_layers - num_moe) * 3 * family.hidden * family.dense_intermediate()
        linear += num_moe * 3 * family.hidden * family.shared_intermediate()
        small = family.num_layers * norms + num_moe * family.num_experts * family.hidden
        if family.get("model_type") == "qwen2_moe":
            small += num_moe * family.hidden  # the gate of the shared expert
        if family.get("scoring_func") == "sigmoid" or family.get("topk_method") == "noaux_tc":
            small += num_moe * family.num_experts * (4 // self._element_bytes)  # correction bias, float32
        return self._quantization.linear_bytes(linear, self._element_bytes) + small * self._element_bytes
