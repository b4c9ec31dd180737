"""The engine of `test_host_kv_gpu`: sessions that return while the balloon moves, one JSON line about their answers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm import SamplingParams

from loadtests.bench.child.resize import feasible_caps, move, split_at
from wisp_core.contracts import Outcome, Split
from wisp_core.engine.host_kv import blocks_to_copy
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

NUM_SESSIONS = 6
NUM_TOKENS = 16


def sampling(session: int, max_tokens: int = NUM_TOKENS) -> SamplingParams:
    """Sampled with a seed, since greedy answers of made-up weights repeat one token."""
    return SamplingParams(
        temperature=1.0, seed=session, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2
    )


class Sessions:
    """Prompts that share nothing, asked one at a time, so that answers depend on nothing else."""

    def __init__(self, engine: OfflineEngine, *, prompt_tokens: int, vocab_size: int) -> None:
        self.engine = engine
        self.prompts = [
            {"prompt_token_ids": [random.Random(f"{one}:{place}").randrange(3, vocab_size) for place in range(size)]}
            for one, size in ((one, prompt_tokens - 7 * one) for one in range(NUM_SESSIONS))
        ]

    def ask(self) -> dict[str, Any]:
        """Digest of all tokens and log-probabilities, and what was not computed."""
        outputs = [
            self.engine.generate([prompt], [sampling(session)])[0] for session, prompt in enumerate(self.prompts)
        ]
        digest = hashlib.sha256()
        for output in outputs:
            digest.update(repr(output.outputs[0].token_ids).encode())
            for likeliest in output.outputs[0].logprobs or ():
                digest.update(repr(sorted((token, one.logprob) for token, one in likeliest.items())).encode())
        return {"answers": digest.hexdigest(), "cached": [output.num_cached_tokens or 0 for output in outputs]}

    def run_while(self, caps: list[int]) -> list[str]:
        """All sessions at once, a resize after every second step; returns the outcomes."""
        outcomes: list[str] = []
        llm_engine = self.engine.llm.llm_engine
        for session, prompt in enumerate(self.prompts):
            llm_engine.add_request(f"moving-{session}", prompt, sampling(session))
        while llm_engine.has_unfinished_requests():
            llm_engine.step()
            if caps:
                llm_engine.step()
                outcomes.append(move(self.engine, split_at(self.engine, caps.pop())).outcome.value)
                self.engine.check_integrity()
        return outcomes


def smallest(engine: OfflineEngine) -> Split:
    """The smallest pool that there may be, at the cap as it is."""
    layout = engine.facts.layout
    return Split(cap=engine.snapshot().split.cap, kv_blocks=-(-layout.max_model_len // layout.block_tokens))


def evict(engine: OfflineEngine) -> None:
    """Take nearly all of the KV pool away, and give it back."""
    before = engine.snapshot().split
    for split in (smallest(engine), before):
        outcome = move(engine, split)
        assert outcome.outcome is Outcome.APPLIED, outcome
    engine.check_integrity()


def unsettled(engine: OfflineEngine, sessions: Sessions) -> dict[str, int]:
    """A turn of one step, then the pool shrunk before anything of it is copied: blocks to be copied, and taken."""
    engine.settle()
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.generate([sessions.prompts[0]], [sampling(0, max_tokens=1)])
    engine.llm.reset_prefix_cache()
    scheduler, size = engine.scheduler, engine.facts.layout.kv_group_blocks
    waiting = blocks_to_copy(scheduler)
    taken = scheduler("take", [len(scheduler._wisp_balloon.available_groups()) // 2])["groups"]
    blocks = {block for group in taken for block in range(group * size, (group + 1) * size)}
    for command, groups in (("wisp_unmap_groups", taken), ("wisp_map_groups", taken)):
        engine.llm.llm_engine.collective_rpc(command, None, (groups,))
    scheduler("give", taken)
    return {"waiting": len(waiting), "taken": len(taken), "both": len(waiting & blocks)}


def main() -> None:
    """Take ``{model, engine_args, wisp, prompt_tokens, vocab_size}``."""
    job = json.loads(sys.argv[1])
    engine = OfflineEngine(job["model"], job["engine_args"], WispSettings.model_validate(job["wisp"]))
    sessions = Sessions(engine, prompt_tokens=job["prompt_tokens"], vocab_size=job["vocab_size"])
    sessions.ask()
    result: dict[str, Any] = {"resident": sessions.ask()}
    evict(engine)
    result["evicted"] = sessions.ask()
    engine.settle()
    engine.llm.reset_prefix_cache()
    caps = feasible_caps(engine)
    result["outcomes"] = sessions.run_while([caps[len(caps) * part // 8] for part in (4, 1, 6, 2)])
    result["moved"] = sessions.ask()
    result["unsettled"] = unsettled(engine, sessions)
    sessions.ask()  # computes what was dropped, by other kernels than run over a prefix that is there
    result["copied_late"] = sessions.ask()
    kv = engine.snapshot().kv
    result |= {"fetch_bytes_per_s": kv.fetch_bytes_per_s, "fetched_tokens_per_s": kv.fetched_tokens_per_s}
    engine.settle()
    engine.check_integrity()
    engine.shutdown()
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
