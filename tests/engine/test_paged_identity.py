"""Byte identity: an engine with paged experts against the same engine with all of them resident.

Same arguments, same number of KV blocks, all requests added before the first step; only the pager and its cap differ.
The four engine factors are covered pairwise by five pairs of engine starts, and in each of them every cap is run.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from wisp_core.pager.registry import current_pager

NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCABULARY = 4, 32, 4, 1000
CAPS = (TOP_K, TOP_K + 1, NUM_EXPERTS // 2, NUM_EXPERTS)
MAX_MODEL_LEN = 320
SHARED_TOKENS = 132

EngineFactory = Callable[..., AbstractContextManager[Any]]

Answer = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]
"""Tokens, and for each of them its log-probabilities by token id."""


@dataclass(frozen=True)
class Arguments:
    """The engine factors of one pair of starts, and the cap that the paged one starts with."""

    block_tokens: int
    is_chunked: bool
    has_prefix_cache: bool
    is_tight: bool  # so few KV blocks that running requests are preempted
    first_cap: int

    @property
    def name(self) -> str:
        flags = {"chunked": self.is_chunked, "prefix_cache": self.has_prefix_cache, "tight": self.is_tight}
        return "-".join([f"block{self.block_tokens}", *(flag for flag, is_on in flags.items() if is_on)])

    def engine(self) -> dict[str, object]:
        longest = -(-MAX_MODEL_LEN // self.block_tokens)
        return {
            "max_model_len": MAX_MODEL_LEN,
            "block_size": self.block_tokens,
            "enable_chunked_prefill": self.is_chunked,
            "max_num_batched_tokens": 96 if self.is_chunked else 2048,
            "enable_prefix_caching": self.has_prefix_cache,
            "num_gpu_blocks_override": longest + 2 if self.is_tight else 8 * longest + 1,
            "max_num_seqs": 8,
        }


COVERING = (
    Arguments(32, is_chunked=False, has_prefix_cache=False, is_tight=False, first_cap=TOP_K),
    Arguments(32, is_chunked=True, has_prefix_cache=True, is_tight=True, first_cap=NUM_EXPERTS // 2),
    Arguments(128, is_chunked=False, has_prefix_cache=True, is_tight=True, first_cap=TOP_K + 1),
    Arguments(128, is_chunked=True, has_prefix_cache=False, is_tight=True, first_cap=NUM_EXPERTS),
    Arguments(128, is_chunked=True, has_prefix_cache=True, is_tight=False, first_cap=TOP_K),
)


def prompts(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Token prompts of 28 to 256 tokens, every other with a shared beginning; their answers cross ends of blocks."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(SHARED_TOKENS)]
    made = []
    for index in range(count):
        own = [rng.randrange(3, VOCABULARY) for _ in range((124, 124, 28, 60)[index % 4])]
        made.append({"prompt_token_ids": shared + own if index % 2 == 0 else own})
    return made


def answers(llm: Any, count: int, is_greedy: bool, is_chunked: bool) -> list[Answer]:
    """Generate for ``count`` prompts at once."""
    from vllm import SamplingParams

    # vLLM 0.32.0 on CPU dies of a request's own seed when its prefill is cut into chunks ("CPU Generator does not use
    # offset"): there, all requests draw from the process's generator.
    torch.manual_seed(7)
    seed = None if is_greedy or is_chunked else 7
    sampling = SamplingParams(
        temperature=0.0 if is_greedy else 1.0, seed=seed, max_tokens=16, logprobs=3, ignore_eos=True
    )
    outputs = llm.generate(prompts(count, seed=count), sampling, use_tqdm=False)
    return [
        (
            tuple(output.outputs[0].token_ids),
            tuple(
                tuple((token, found.logprob) for token, found in sorted(of_step.items()))
                for of_step in output.outputs[0].logprobs
            ),
        )
        for output in outputs
    ]


def run(llm: Any, arguments: Arguments) -> list[Answer]:
    """22 prompts in batches of 1, 4 and 8, greedy and sampled, from an empty prefix cache."""
    assert llm.reset_prefix_cache() or not arguments.has_prefix_cache
    batches = ((1, True), (1, False), (4, False), (8, True), (8, False))
    return [answer for count, is_greedy in batches for answer in answers(llm, count, is_greedy, arguments.is_chunked)]


def paged_layers(llm: Any) -> list[Any]:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return [module for module in worker.model_runner.model.modules() if type(module).__name__ == "PagedRoutedExperts"]


def metric(llm: Any, name: str) -> int:
    return sum(found.value for found in llm.get_metrics() if found.name == name)


@pytest.mark.parametrize("arguments", COVERING, ids=lambda arguments: arguments.name)
def test_tokens_and_logprobs_equal_the_resident_engine(open_engine: EngineFactory, arguments: Arguments) -> None:
    with open_engine(None, **arguments.engine()) as llm:
        assert current_pager() is None
        expected = run(llm, arguments)
        # The factors are real: requests are preempted, prefixes are found, or they are not.
        assert (metric(llm, "vllm:num_preemptions") > 0) == arguments.is_tight
        assert (metric(llm, "vllm:prefix_cache_hits") > 0) == arguments.has_prefix_cache
    assert len(expected) == 22
    assert len({tokens for tokens, _ in expected}) > 16

    with open_engine({"cap": arguments.first_cap, "bypass_if_it_fits": False}, **arguments.engine()) as llm:
        pager = current_pager()
        assert pager is not None
        for cap in sorted(CAPS, key=lambda cap: cap != arguments.first_cap):
            pager.set_cap(cap)
            pager.reset_statistics()
            found = run(llm, arguments)
            differing = [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
            assert differing == [], f"at cap {cap}"
            check_paging_was_real(pager, cap)


def check_paging_was_real(pager: Any, cap: int) -> None:
    pager.check_integrity()
    by_cap = pager.experts_bytes_by_cap()
    assert pager.resident_bytes() == by_cap[cap] == by_cap[NUM_EXPERTS] * cap // NUM_EXPERTS
    decode, prefill = pager.counts_decode, pager.counts_prefill
    assert decode.hits > 0
    if cap == NUM_EXPERTS:
        return
    assert [len(experts) for experts in pager.resident()] == [cap] * NUM_LAYERS
    assert decode.misses > 0
    assert 0 < prefill.misses < prefill.distinct
    if cap <= TOP_K + 1:
        # Some steps need more experts than there are slots: they are cut, and experts are copied more than once.
        assert decode.hits + decode.misses > decode.distinct


def test_experts_live_in_host_memory_once_and_in_slots_by_cap(open_engine: EngineFactory) -> None:
    with open_engine({"cap": 8}, num_gpu_blocks_override=20) as llm:
        layers = paged_layers(llm)
        assert len(layers) == NUM_LAYERS
        pager = current_pager()
        assert pager is not None
        assert pager.resident_bytes() == pager.experts_bytes_by_cap()[8]
        in_use = {getattr(layer, name).data_ptr() for layer in layers for name in ("w13_weight", "w2_weight")}
        # Every living tensor with all experts in front: slots, and one host copy of each parameter.
        gc.unfreeze()  # vLLM hides what lives at start from the collector
        addresses = {
            tensor.data_ptr()
            for tensor in gc.get_objects()
            if type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.device.type == "cpu"  # vLLM keeps shapes of reloadable weights as meta tensors
            and tensor.dim() == 3
            and tensor.shape[0] == NUM_EXPERTS
        }
        assert in_use < addresses
        assert len(addresses) == 2 * len(in_use) == 4 * NUM_LAYERS


def test_without_a_wisp_object_the_layer_is_vllms_own(open_engine: EngineFactory) -> None:
    with open_engine(None, num_gpu_blocks_override=20) as llm:
        assert [layer._pager for layer in paged_layers(llm)] == [None] * NUM_LAYERS
        assert current_pager() is None


@pytest.mark.parametrize(
    ("wisp", "arguments", "message"),
    [
        ({"cap": 3}, {}, r"additional_config\.wisp\.cap is 3.*set it to 4\.\.32"),
        ({"cap": 33}, {}, r"additional_config\.wisp\.cap is 33.*set it to 4\.\.32"),
        ({}, {}, "needs 'cap'"),
        ({"cap": 8, "caps": 9}, {}, r"additional_config\.wisp\.caps: Extra inputs"),
        ({"cap": 8}, {"enable_lora": True}, "--enable-lora"),
        ({"cap": 8}, {"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"cap": 8}, {"quantization": "fp8"}, "no --quantization"),
    ],
    ids=str,
)
def test_what_cannot_be_paged_is_refused_at_start(
    open_engine: EngineFactory, wisp: dict[str, object], arguments: dict[str, object], message: str
) -> None:
    from wisp_core.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=message), open_engine(wisp, **arguments):
        pass
