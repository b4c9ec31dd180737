"""How far each token of answers is from the best one, by an engine that holds every expert.

``python -m loadtests.service.rescore MODEL ENGINE_ARGS.json ANSWERS.json GAPS.json``
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.environment import engine_environment, set_in_this_process

Answer = dict[str, Any]
"""``prompt``: text of one user message; ``tokens``: texts of the answer's tokens, decoded greedily."""


def rescore(model: str, engine_args: dict[str, Any], answers: Sequence[Answer], directory: Path) -> list[float]:
    """For each answer, the largest distance of a token's log-probability from the best one's at its place.

    In a process of its own. Raises RuntimeError with its last words if it fails.
    """
    files = [directory / name for name in ("engine-args.json", "answers.json", "gaps.json")]
    files[0].write_text(json.dumps(engine_args))
    files[1].write_text(json.dumps(list(answers)))
    command = [sys.executable, "-m", "loadtests.service.rescore", model, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the resident engine failed: {(done.stdout + done.stderr)[-2000:]}")
    gaps: list[float] = json.loads(files[2].read_text())
    return gaps


def gaps_of(model: str, engine_args: dict[str, Any], answers: Sequence[Answer]) -> list[float]:
    """What ``rescore`` gives, in this process."""
    from wisp_core.engine.offline import OfflineEngine, SamplingParams

    engine = OfflineEngine(model, engine_args)
    tokenizer = engine.llm.get_tokenizer()
    ids_by_text = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    gaps = []
    for answer in answers:
        messages = [{"role": "user", "content": answer["prompt"]}]
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        chosen = [ids_by_text[text] for text in answer["tokens"]]
        (output,) = engine.generate([{"prompt_token_ids": prompt + chosen}], sampling)
        rows = output.prompt_logprobs[len(prompt) :]
        best = [max(entry.logprob for entry in row.values()) for row in rows]
        picked = [row[token].logprob for row, token in zip(rows, chosen, strict=True)]
        gaps.append(max((high - own for high, own in zip(best, picked, strict=True)), default=0.0))
    engine.shutdown()
    return gaps


def main() -> None:
    """Entry point of the process."""
    model, engine_args, answers, gaps = sys.argv[1:]
    set_in_this_process(engine_environment(is_cpu=True, is_local_model=Path(model).is_dir()))
    set_in_this_process({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    found = gaps_of(model, json.loads(Path(engine_args).read_text()), json.loads(Path(answers).read_text()))
    Path(gaps).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
