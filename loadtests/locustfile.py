"""A Locust user that is an agent session: bursts of tool-call turns, now and then a turn with a long document.

Headless against a running service: ``wisp load --users 8 --run-time 30s``. With ``--wisp-phase-s`` all users do the one
for so long, then the other, so that what the service is asked for has phases.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from locust import HttpUser, between, events, task
from locust.env import Environment
from locust.stats import PERCENTILES_TO_REPORT, StatsCSV

from services.demo.workload import Agent, AgentSpec, Turn

_NUM_TOPICS = 8
_MAX_CONTEXT_TOKENS = 2000
_LONG_CONTEXT_TOKENS = 800  # beyond the long document's words
_BURSTS_PER_DOCUMENT = 8
_FOLLOW_UPS = 3  # to a document in a phase of documents
_numbers = itertools.count()


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--wisp-model", default="tiny-moe", help="Model name.")
    parser.add_argument("--wisp-keys", default="{}", help="JSON: key file by tenant.")
    parser.add_argument("--wisp-long-words", type=int, default=1500, help="Words of a long document.")
    parser.add_argument("--wisp-phase-s", type=float, default=0.0, help="Length of a phase; 0: none.")
    parser.add_argument("--wisp-stats", default="", help="Write the table at the very end here, as CSV.")


@events.init.add_listener  # type: ignore[untyped-decorator]
def _refuse_without_keys(environment: Environment, **_: Any) -> None:
    """A run without a key that can be read ends before its first user. Raises SystemExit."""
    given = environment.parsed_options.wisp_keys
    try:
        paths = [Path(path) for path in json.loads(given).values()]
    except (ValueError, AttributeError):
        paths = []
    if not paths:
        sys.exit(f'--wisp-keys {given}: give a JSON object of key files by tenant, {{"acme": "acme.key"}}')
    if missing := [str(path) for path in paths if not path.is_file()]:
        sys.exit(f"--wisp-keys: there is no file {', '.join(missing)}")


@events.init.add_listener  # type: ignore[untyped-decorator]
def _write_stats_at_the_end(environment: Environment, **_: Any) -> None:
    """What Locust writes by ``--csv`` lacks the last seconds: it is flushed now and then only."""

    def write(**_: Any) -> None:
        if environment.parsed_options.wisp_stats:
            with Path(environment.parsed_options.wisp_stats).open("w", newline="") as file:
                StatsCSV(environment, PERCENTILES_TO_REPORT).requests_csv(csv.writer(file))

    environment.events.quit.add_listener(write)


class AgentUser(HttpUser):  # type: ignore[misc]  # Locust is not typed here
    """One session of one tenant's user."""

    wait_time = between(0.05, 0.5)

    def on_start(self) -> None:
        """Take a tenant, a user and a topic in turn."""
        options = self.environment.parsed_options
        key_files: dict[str, str] = json.loads(options.wisp_keys)
        self.client.trust_env = False  # No proxy: the service is here.
        number = next(_numbers)
        tenant = sorted(key_files)[number % len(key_files)]
        self._model = options.wisp_model
        self._key = Path(key_files[tenant]).read_text().strip()
        # Each of Locust's worker processes counts its own users.
        worker = getattr(self.environment.runner, "worker_index", 0)
        self._spec = AgentSpec(
            tenant=tenant, user=f"load-{number % 6}", session_id=f"load-{worker}-{number}", topic=number % _NUM_TOPICS
        )
        self._num_agents = 0
        self._long_words: int = options.wisp_long_words
        self._max_context_tokens = max(_MAX_CONTEXT_TOKENS, self._long_words + _LONG_CONTEXT_TOKENS)
        self._phase_s: float = options.wisp_phase_s
        self._started_s = time.monotonic()
        self._renew()

    @task  # type: ignore[untyped-decorator]
    def work(self) -> None:
        """What the phase is for; without phases mostly bursts."""
        if self._phase_s > 0:
            is_long = int((time.monotonic() - self._started_s) / self._phase_s) % 2 == 1
            if is_long:
                self.long_document(_FOLLOW_UPS)
            else:
                self.burst()
        elif random.randrange(_BURSTS_PER_DOCUMENT + 1):
            self.burst()
        else:
            self.long_document(1)

    def burst(self) -> None:
        """Two to six short turns, without a pause."""
        for _ in range(random.randint(2, 6)):
            self._turn(self._agent.burst_turn(), "burst turn")

    def long_document(self, num_questions: int) -> None:
        """One turn with a long document in it, and questions about it."""
        self._renew()
        self._turn(self._agent.long_turn(self._long_words), "long turn")
        for _ in range(num_questions):
            self._turn(self._agent.long_turn(30), "follow-up turn")
        self._renew()

    def _renew(self) -> None:
        self._num_agents += 1
        self._agent = Agent(self._spec, task=self._num_agents)

    def _turn(self, turn: Turn, name: str) -> None:
        """Stream one turn; Locust counts it under ``name``, and its first token under the type TTFT."""
        body = turn.request(self._model) | {
            "user": self._spec.user,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {self._key}", "x-session-id": self._spec.session_id}
        started_s = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=body, headers=headers, name=name, stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                # Without an answer the status is 0, and the text empty.
                response.failure(f"{response.status_code}: {response.error or response.text[:200]}")
                return
            message = self._read(response, name, started_s)
            # Locust stops its clock at the headers of a stream.
            response.request_meta["response_time"] = (time.perf_counter() - started_s) * 1000
            if message is None:
                response.failure("the stream ended early")
                return
            response.success()
        self._agent.take(message)

    def _read(self, response: Any, name: str, started_s: float) -> dict[str, Any] | None:
        """The assistant's message, or None when the stream did not end as it should."""
        text, calls, usage = "", dict[int, dict[str, Any]](), None
        is_first = True
        for line in response.iter_lines(decode_unicode=True):
            if not line.startswith("data: "):
                continue
            if is_first:
                self._fire_ttft(name, started_s)
                is_first = False
            if line == "data: [DONE]":
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return None
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
                _add_calls(calls, choice["delta"].get("tool_calls") or ())
        if usage is None:
            return None
        if usage["total_tokens"] > self._max_context_tokens:
            self._renew()
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})

    def _fire_ttft(self, name: str, started_s: float) -> None:
        environment: Environment = self.environment
        environment.events.request.fire(
            request_type="TTFT",
            name=name,
            response_time=(time.perf_counter() - started_s) * 1000,
            response_length=0,
            exception=None,
            context={},
        )


def _add_calls(calls: dict[int, dict[str, Any]], parts: Any) -> None:
    for part in parts:
        function = part.get("function") or {}
        call = calls.setdefault(
            part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""
