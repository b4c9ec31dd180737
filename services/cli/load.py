"""``wisp load``: Locust against a running service, with the service's own figures beside Locust's."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from services.app import Service
from services.cli.operator import Operator
from services.preflight import checked_start
from services.start_progress import progress_to
from wisp_core.errors import ConfigurationError

LOCUST_FILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
_RUN_TIME = re.compile(r"\d+|(?=\d)(\d+h)?(\d+m)?(\d+s)?")


@dataclass(frozen=True)
class Counters:
    """Series of ``/metrics`` that a load run changes, summed over all their labels but the ones named."""

    values: dict[str, float]

    @classmethod
    def read(cls, service: Operator) -> Counters:
        """Read the page. Raises EngineUnavailableError when it does not come."""
        page = service.read("/metrics").text
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return cls(values)

    def since(self, before: Counters, name: str) -> float:
        """How much ``name`` has grown."""
        return self.values.get(name, 0.0) - before.values.get(name, 0.0)


def run_load(*, users: int, run_time: str, state_dir: Path, is_own_service: bool) -> int:
    """Run Locust headless and print the summary; the exit code is Locust's: 1 if any turn failed.

    Raises ConfigurationError without Locust, and for a ``run_time`` that it would not take.
    """
    refuse_without_locust()
    if not _RUN_TIME.fullmatch(run_time):
        raise ConfigurationError(f"--run-time {run_time}: give seconds, or a time such as 30s, 5m or 1h30m")
    with ExitStack() as stack:
        if is_own_service:
            from services.demo.run import prepare_demo

            config = prepare_demo("mv_wsa")
            stack.enter_context(checked_start(config))
            with progress_to(Console(stderr=True).print):
                stack.enter_context(Service(config))
            state_dir = config.state_dir
        service = Operator(state_dir)
        before = Counters.read(service)
        code, rows = run_locust(service.facts, users, run_time)
        after = Counters.read(service)
    if rows:
        _print_summary(rows, after, before)
    return code


def refuse_without_locust() -> None:
    """Raise ConfigurationError where Locust is not installed, before anything starts."""
    if find_spec("locust") is None:
        raise ConfigurationError("Locust is not installed: pip install 'wisp[load]'")


def run_locust(
    facts: dict[str, Any], users: int, run_time: str, extra: Sequence[str] = ()
) -> tuple[int, list[dict[str, str]]]:
    """Exit code and the rows of Locust's table, as text. ``facts`` are those of the service's file.

    ``extra`` are further options, such as those that the file of its users adds.
    """
    # Its own process: Locust patches the standard library for gevent at import.
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "locust", "-f", str(LOCUST_FILE), "--headless", "--only-summary"]
        command += ["--users", str(users), "--spawn-rate", str(users), "--run-time", run_time, "--stop-timeout", "60"]
        command += ["--host", facts["url"], "--loglevel", "WARNING", "--wisp-stats", f"{directory}/stats.csv"]
        command += ["--wisp-model", facts["model"], "--wisp-keys", json.dumps(facts["key_files"])]
        done = subprocess.run([*command, *extra], check=False)
        try:
            with (Path(directory) / "stats.csv").open(newline="") as file:
                return done.returncode, list(csv.DictReader(file))
        except FileNotFoundError:
            return done.returncode or 1, []


def _print_summary(rows: list[dict[str, str]], after: Counters, before: Counters) -> None:
    console = Console()
    table = Table(title="Clients (Locust)")
    for name in ("what", "requests", "failures", "median, ms", "95 %, ms", "per s"):
        table.add_column(name)
    # Not the sum over all rows: a turn and its TTFT are a row each.
    for row in (row for row in rows if row["Name"] != "Aggregated"):
        table.add_row(
            f"{row['Type']} {row['Name']}".strip(),
            row["Request Count"],
            row["Failure Count"],
            row["50%"],
            row["95%"],
            f"{float(row['Requests/s']):.2f}",
        )
    console.print(table)
    table = Table(title="Service (/metrics, change over the run)")
    table.add_column("series")
    table.add_column("value", justify="right")
    for name, value in _service_figures(after, before):
        table.add_row(name, value)
    console.print(table)


def _service_figures(after: Counters, before: Counters) -> list[tuple[str, str]]:
    def grown(name: str) -> float:
        return after.since(before, name)

    hits, misses = grown("wisp_replica_expert_hits_total"), grown("wisp_replica_expert_misses_total")
    return [
        ("HTTP requests at the replicas", f"{grown('wisp_replica_turns_total'):.0f}"),
        ("prompt tokens", f"{grown('vllm:prompt_tokens_total'):.0f}"),
        ("generated tokens", f"{grown('vllm:generation_tokens_total'):.0f}"),
        ("prefix cache hit tokens", f"{grown('vllm:prefix_cache_hits_total'):.0f}"),
        ("preemptions", f"{grown('vllm:num_preemptions_total'):.0f}"),
        ("expert hits", f"{hits:.0f}"),
        ("expert misses", f"{misses:.0f}"),
        ("expert hit rate", f"{hits / (hits + misses):.1%}" if hits + misses else "none used"),
        ("expert bytes copied, MiB", f"{grown('wisp_replica_expert_copied_bytes_total') / 2**20:.1f}"),
        ("bytes resized, MiB", f"{grown('wisp_replica_resized_bytes_total') / 2**20:.1f}"),
        ("engine restarts", f"{grown('wisp_replica_engine_restarts_total'):.0f}"),
    ]
