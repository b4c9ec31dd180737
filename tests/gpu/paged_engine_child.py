"""One engine of `test_paged_engine`: answers the same prompts at each cap, prints one JSON line."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from vllm import LLM, SamplingParams

from loadtests.bench.child.weights import LOAD_FORMAT
from loadtests.shapes import QWEN3_30B_A3B, write_shape
from wisp_core.contracts import Split
from wisp_core.engine.offline import OfflineEngine
from wisp_core.pager.plugin import register
from wisp_core.pager.registry import current_pager
from wisp_core.settings import WispSettings

PROMPTS = {
    "one": [40],
    "four": [32, 100, 7, 300],
    "eight": [50] * 8,
    "long": [2000],
    "longest": [8000],
    "mix": [2000, 3],
}
NUM_TOKENS = 24
ARGUMENTS = {
    "load_format": LOAD_FORMAT,
    "skip_tokenizer_init": True,
    "moe_backend": "triton",
    "max_model_len": 8192,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "seed": 0,
}
HOST_BYTES = 64 << 30


def ask(llm: LLM, lengths: list[int]) -> str:
    """Digest of all tokens and log-probabilities; sampled with a seed, since greedy answers repeat one token."""
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 150_000) for _ in range(length)]} for length in lengths]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=3,
            extra_args={"wisp_session": f"tenant/user/{seed}"},
        )
        for seed in range(len(lengths))
    ]
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        answer = output.outputs[0]
        logprobs = [sorted((token, entry.logprob) for token, entry in step.items()) for step in answer.logprobs or []]
        found.append((list(answer.token_ids), logprobs))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def ask_all(llm: LLM) -> dict[str, str]:
    return {name: ask(llm, lengths) for name, lengths in PROMPTS.items()}


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def run_fixed_budget(model: str, arguments: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Resizes between the caps; what experts leave is KV, up to a bound that keeps the pools moving."""
    caps = job["caps"]
    settings = WispSettings(
        cap=caps[0] if caps else None,
        vram_budget_bytes=job["budget_bytes"],
        activation_bytes=1 << 30,
        host_memory_bytes=HOST_BYTES,
        **job.get("wisp", {}),
    )
    started_s = time.perf_counter()
    engine = OfflineEngine(model, arguments, settings)
    start_s = time.perf_counter() - started_s
    layout, budget = engine.snapshot().layout, engine.snapshot().budget_bytes
    result: dict[str, Any] = {
        "answers": [ask_all(engine.llm)],
        "outcomes": [],
        "used_bytes": [used_bytes()],
        "is_paged": layout.is_paged,
        "start_s": start_s,
        "signatures": signatures(engine),
        "decode": engine.snapshot().decode.model_dump(),
    }
    pager = current_pager()
    if pager is not None:
        result["prefetched"] = asdict(pager.prefetched)  # type: ignore[attr-defined]
    for cap in caps[1:]:
        blocks = min(layout.kv_blocks_within(budget - layout.experts_bytes_by_cap[cap]), 3000)
        result["outcomes"].append(engine.resize(engine.plan(Split(cap=cap, kv_blocks=blocks))).outcome)
        result["answers"].append(ask_all(engine.llm))
        result["used_bytes"].append(used_bytes())
        engine.check_integrity()
    engine.shutdown()
    return result


def signatures(engine: OfflineEngine) -> dict[str, list[int]]:
    """Decode tokens, lookups and hits by key. The first call may only start the copy."""
    found = engine.signatures()
    torch.cuda.synchronize()
    found += engine.signatures()
    return {one.key: [one.decode_tokens, one.lookups, one.hits] for one in found}


def run_caps(model: str, arguments: dict[str, Any], caps: list[int]) -> dict[str, Any]:
    """Plain vLLM with the pager's layer, or without it for no caps."""
    if caps:
        settings = WispSettings(cap=max(caps), host_memory_bytes=HOST_BYTES, bypass_if_it_fits=False)
        arguments = {**arguments, "additional_config": {"wisp": settings.model_dump(exclude_none=True)}}
    llm = LLM(model=model, kv_cache_memory_bytes=2 << 30, **arguments)
    if not caps:
        return {"answers": [ask_all(llm)]}
    pager = current_pager()
    assert pager is not None
    answers = []
    for cap in caps:
        pager.set_cap(cap)
        answers.append(ask_all(llm))
        pager.check_integrity()
    return {"answers": answers, "misses": pager.counts_decode.misses}


def main() -> None:
    job = json.loads(sys.argv[1])
    register()
    with tempfile.TemporaryDirectory() as scratch:
        # One directory for engines that share experts: the copy is keyed by it.
        directory = job.get("model_dir", scratch)
        if not Path(directory, "config.json").exists():
            write_shape(Path(directory), replace(QWEN3_30B_A3B, layers=4))
        arguments = {**ARGUMENTS, **job["engine_args"]}
        if "budget_bytes" in job:
            result = run_fixed_budget(directory, arguments, job)
        else:
            result = run_caps(directory, arguments, job["caps"])
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
