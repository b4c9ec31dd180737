"""One engine of `test_engine_features`: answers prompts of a few sessions, prints one JSON line about itself."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from vllm import LLM, SamplingParams

from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.weights import LOAD_FORMAT
from loadtests.shapes import QWEN3_30B_A3B, write_shape
from wisp_core.engine.offline import OfflineEngine
from wisp_core.pager.registry import current_pager
from wisp_core.settings import WispSettings

BATCHES = [[40], [32, 100, 7, 300], [50] * 8, [1500]]
NUM_TOKENS = 24
ARGUMENTS: dict[str, Any] = {
    "load_format": LOAD_FORMAT,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "seed": 0,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}
PLAIN = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}  # others may use the card too
HOST_BYTES = 64 << 30


def ask(llm: LLM) -> str:
    """Digest of all tokens and log-probabilities; sampled with a seed, since greedy answers repeat one token."""
    digest = hashlib.sha256()
    for lengths in BATCHES:
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
        for output in llm.generate(prompts, params, use_tqdm=False):
            answer = output.outputs[0]
            steps = [sorted((token, entry.logprob) for token, entry in step.items()) for step in answer.logprobs or []]
            digest.update(repr((list(answer.token_ids), steps)).encode())
    return digest.hexdigest()


def signatures(engine: OfflineEngine) -> dict[str, list[int]]:
    """Decode tokens, lookups and hits by key. The first call may only start the copy."""
    found = engine.signatures()
    torch.cuda.synchronize()
    found += engine.signatures()
    return {one.key: [one.decode_tokens, one.lookups, one.hits] for one in found}


def facts(engine: OfflineEngine, memory: GpuMemory) -> dict[str, Any]:
    """What a paged or bypassed engine says after its answers."""
    torch.cuda.synchronize()  # while the device works, counts are those of an earlier report
    snapshot, pager = engine.snapshot(), current_pager()
    engine.check_integrity()
    return {
        "peak_bytes": memory.peak_bytes(),
        "is_paged": snapshot.layout.is_paged,
        "decode": snapshot.decode.model_dump(),
        "signatures": signatures(engine) if pager is not None else {},
        "prefetched": asdict(pager.prefetched) if pager is not None else {},  # type: ignore[attr-defined]
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    model = Path(job["model"])
    if not (
        model / "config.json"
    ).exists():  # written again it would be another checkpoint, with a host copy of its own
        write_shape(model, replace(QWEN3_30B_A3B, layers=4))
    memory = GpuMemory()
    wisp = job["wisp"]
    settings = None if wisp is None else WispSettings(activation_bytes=1 << 30, host_memory_bytes=HOST_BYTES, **wisp)
    arguments = ARGUMENTS if wisp is not None else {**ARGUMENTS, **PLAIN}
    if job["is_eager"]:
        arguments = {**arguments, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}
    started_s = time.perf_counter()
    engine = OfflineEngine(job["model"], arguments, settings)
    result: dict[str, Any] = {"start_s": time.perf_counter() - started_s, "answers": ask(engine.llm)}
    if wisp is not None:
        result |= facts(engine, memory)
    engine.shutdown()
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
