"""One engine of `test_host_copy`: starts, answers, prints one JSON line, and lives until its input ends."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm import SamplingParams

from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

PROMPTS = [{"prompt_token_ids": [3 + (7 * i + j) % 500 for j in range(20 + 9 * i)]} for i in range(4)]


def main() -> None:
    model, store_dir = sys.argv[1:]
    settings = WispSettings(
        cap=8, vram_budget_bytes=3 * 10**9, host_store_dir=store_dir, host_memory_bytes=1 << 30, bypass_if_it_fits=False
    )
    started_s = time.perf_counter()
    engine = OfflineEngine(model, {"max_model_len": 512, "max_num_seqs": 8, "seed": 0}, settings)
    start_s = time.perf_counter() - started_s
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=16, logprobs=2) for seed in range(len(PROMPTS))]
    found = []
    for output in engine.generate(PROMPTS, params):
        answer = output.outputs[0]
        found.append((list(answer.token_ids), [sorted((t, e.logprob) for t, e in s.items()) for s in answer.logprobs]))
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    sys.stdout.write("\n" + json.dumps({"start_s": start_s, "answers": digest}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    engine.shutdown()


if __name__ == "__main__":
    main()
