"""Answers recorded prompts on an engine that holds all experts, in a process of its own.

``python -m services.demo.reference MODEL ENGINE_ARGS.json PROMPTS.json ANSWERS.json``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from services.environment import engine_environment, set_in_this_process

_SERVER_ONLY = {"enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "chat_template"}


def answer_all(model: str, engine_args: dict[str, Any], prompts: list[dict[str, Any]]) -> list[list[list[Any]]]:
    """For each prompt its sampled ``[token text, log-probability]`` pairs; one prompt at a time."""
    from wisp_core.engine.offline import OfflineEngine, SamplingParams

    engine = OfflineEngine(model, {name: value for name, value in engine_args.items() if name not in _SERVER_ONLY})
    answers = []
    for prompt in prompts:
        sampling = SamplingParams(
            temperature=prompt["temperature"], seed=prompt["seed"], max_tokens=prompt["max_tokens"], logprobs=0
        )
        # What a fresh salt does on the live replica: a cached prefix would change how the rest is cut into chunks.
        engine.llm.reset_prefix_cache()
        (output,) = engine.llm.chat(prompt["messages"], sampling, tools=prompt.get("tools"), use_tqdm=False)
        answer = output.outputs[0]
        assert answer.logprobs is not None, "they were asked for"
        picked = [row[token] for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        answers.append([[token.decoded_token, token.logprob] for token in picked])
    engine.shutdown()
    return answers


def main() -> None:
    """Entry point of the process."""
    model, engine_args, prompts, answers = sys.argv[1:]
    is_local = Path(model).is_dir()
    set_in_this_process(engine_environment(is_cpu=True, is_local_model=is_local))
    set_in_this_process({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    result = answer_all(model, json.loads(Path(engine_args).read_text()), json.loads(Path(prompts).read_text()))
    Path(answers).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
