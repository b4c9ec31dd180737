"""The tiny checkpoint: reproducible, readable, and routed by topic."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from wisp_core.errors import ConfigurationError
from wisp_core.tiny_model import tiny_tokenizer
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

CONFIG = TinyModelConfig(layers=3, moe_intermediate=64, words_per_topic=64, dtype="float32")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, CONFIG)
    return directory


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_equal_configs_give_equal_bytes_and_another_seed_gives_others(model_dir: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "again", CONFIG)
    assert _digests(tmp_path / "again") == _digests(model_dir)
    write_tiny_model(tmp_path / "other", TinyModelConfig(**{**CONFIG.__dict__, "seed": 1}))
    assert _digests(tmp_path / "other")["model.safetensors"] != _digests(model_dir)["model.safetensors"]


def test_whoever_may_read_the_configuration_may_read_the_weights(model_dir: Path) -> None:
    modes = {path.name: path.stat().st_mode for path in model_dir.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_every_topic_word_is_one_token_of_its_slice(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    words = list(itertools.chain.from_iterable(CONFIG.topic_words(topic) for topic in range(CONFIG.topics)))
    assert len(set(words)) == len(words)
    ids = tokenizer.encode("".join(f" {word}" for word in words))
    assert ids == list(range(tiny_tokenizer.first_word_id(), tiny_tokenizer.first_word_id() + len(words)))


@pytest.mark.parametrize("text", ["naïve café 東京 \n\t{'a': [1, 2]}", "<|im_end|> kebo", "", " " * 9])
def test_any_text_survives_the_tokenizer(model_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < CONFIG.vocab_size


def test_chat_template_shows_tools_calls_and_results(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"q": 1}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "kebo"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
        ],
        tools=[tool],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.count("Be brief.") == 1
    assert '"name": "search", "parameters"' in text
    assert '<tool_call>\n{"name": "search", "arguments": {"q": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\nfound\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.convert_tokens_to_ids("<tool_call>")) == 2


def _routed_experts(model_dir: Path, topic: int, num_tokens: int, seed: int) -> np.ndarray:
    """Top-k ids ``[layers, tokens, top_k]`` of text that the model itself samples, after a prompt of one topic."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    words = np.random.default_rng(seed).choice(CONFIG.topic_words(topic), 24)
    prompt = tokenizer("".join(f" {word}" for word in words), return_tensors="pt").input_ids
    torch.manual_seed(seed)
    with torch.inference_mode():
        ids = model.generate(prompt, max_new_tokens=num_tokens, do_sample=True, eos_token_id=None, pad_token_id=0)
        logits = model(ids, output_router_logits=True).router_logits
    assert all(torch.isfinite(layer).all() for layer in logits)
    return np.stack([layer.topk(CONFIG.top_k).indices.numpy() for layer in logits])[:, prompt.shape[1] :]


@pytest.fixture(scope="module")
def routing(model_dir: Path) -> dict[tuple[int, int], np.ndarray]:
    return {(t, s): _routed_experts(model_dir, t, 64, s) for t in range(CONFIG.topics) for s in (0, 1)}


def _frequencies(ids: np.ndarray) -> np.ndarray:
    return np.concatenate([np.bincount(layer.ravel(), minlength=CONFIG.experts) for layer in ids]) / ids[0].size


def test_working_sets_overlap_far_more_within_a_topic_than_across(routing: dict[tuple[int, int], np.ndarray]) -> None:
    used = {key: _frequencies(ids) for key, ids in routing.items()}
    within = [np.minimum(used[t, 0], used[t, 1]).sum() / CONFIG.layers for t in range(CONFIG.topics)]
    across = [
        np.minimum(used[a, 0], used[b, 1]).sum() / CONFIG.layers
        for a, b in itertools.permutations(range(CONFIG.topics), 2)
    ]
    assert min(within) > 0.7
    assert np.mean(within) > 2 * np.mean(across)


def _lru_miss_rate(ids: np.ndarray, cap: int) -> float:
    misses = lookups = 0
    for layer in ids:
        slots: dict[int, None] = {}
        for row in layer:
            for expert in row.tolist():
                lookups += 1
                misses += expert not in slots
                slots.pop(expert, None)
                slots[expert] = None
            while len(slots) > cap:
                slots.pop(next(iter(slots)))
    return misses / lookups


def test_miss_curve_falls_with_the_cap_and_is_not_flat(routing: dict[tuple[int, int], np.ndarray]) -> None:
    # One stream that changes its topic every eight tokens, as a replica sees several sessions.
    trace = np.concatenate([routing[t, 0][:, i : i + 8] for i in range(0, 64, 8) for t in range(4)], axis=1)
    rates = [_lru_miss_rate(trace, cap) for cap in (4, 8, 16, 24, 32)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.35
    assert rates[0] - rates[2] > 0.15
    assert rates[-1] < 0.05


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "olmoe"])
def test_checkpoint_has_exactly_the_tensors_of_its_architecture(arch: str, tmp_path: Path) -> None:
    config = TinyModelConfig(
        arch=arch, experts=8, top_k=2, layers=2, hidden=64, moe_intermediate=32, heads=4, kv_heads=4, head_dim=16
    )
    write_tiny_model(tmp_path, config)
    assert AutoConfig.from_pretrained(tmp_path).model_type == arch
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_bad_settings_are_all_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TinyModelConfig(arch="gpt2", top_k=64, topics=512, dtype="int4")
    for setting in ("arch 'gpt2'", "top_k 64", "hidden 256", "dtype 'int4'", "topics x words_per_topic"):
        assert setting in str(caught.value)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(ConfigurationError, match="give another directory"):
        write_tiny_model(taken / "model", TinyModelConfig())
