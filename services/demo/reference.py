"""Asks an engine that holds all experts, in a process of its own: what it answers is what a paged replica must.

``python -m services.demo.reference FUNCTION MODEL ASKED.json FOUND.json``
"""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.environment import engine_environment, set_in_this_process
from wisp_core.errors import EngineUnavailableError

_SERVER_ONLY = {"enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "chat_template"}


def ask_resident(
    function: str, model: str, engine_args: dict[str, Any], questions: Sequence[Any], directory: Path
) -> list[Any]:
    """What ``function``, written as ``module:name``, returns of such an engine and ``questions``.

    Everything is passed as JSON, in files in ``directory``. Raises EngineUnavailableError with its last words.
    """
    asked, found = directory / "asked.json", directory / "found.json"
    arguments = {name: value for name, value in engine_args.items() if name not in _SERVER_ONLY}
    asked.write_text(json.dumps({"engine_args": arguments, "questions": list(questions)}))
    command = [sys.executable, "-m", "services.demo.reference", function, model, str(asked), str(found)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise EngineUnavailableError(f"the resident engine failed: {done.stdout.decode(errors='replace')[-2000:]}")
    answers: list[Any] = json.loads(found.read_text())
    return answers


def answers(engine: Any, prompts: list[dict[str, Any]]) -> list[list[list[Any]]]:
    """For each prompt its sampled ``[token text, log-probability]`` pairs; one prompt at a time."""
    from wisp_core.engine.offline import SamplingParams

    found = []
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
        found.append([[token.decoded_token, token.logprob] for token in picked])
    return found


def main() -> None:
    """Entry point of the process."""
    function, model, asked, found = sys.argv[1:]
    set_in_this_process(engine_environment(is_cpu=True, is_local_model=Path(model).is_dir()))
    set_in_this_process({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"})
    # Here, not at the top: vLLM takes seconds, and reads its environment when it is imported.
    from wisp_core.engine.offline import OfflineEngine

    task = json.loads(Path(asked).read_text())
    engine = OfflineEngine(model, task["engine_args"])
    Path(found).write_text(json.dumps(pkgutil.resolve_name(function)(engine, task["questions"])))
    engine.shutdown()


if __name__ == "__main__":
    main()
