"""The command `wisp bench service`: configuration in, a results file, a table and one JSON line out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from loadtests.report import Measured, print_last_line, print_table, result_path, write_result
from loadtests.rows import Row
from loadtests.service.made_up import python_path, with_made_up_weights
from loadtests.service.run import Found, ServiceRun, host_copies, run_service
from services.cli.load import refuse_without_locust
from services.config import ServiceConfig
from services.environment import replica_environment, set_in_this_process
from wisp_core.errors import ConfigurationError
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

_FACTS = "import json; from loadtests.bench.child.hardware import facts; print(json.dumps(facts()))"


@dataclass(frozen=True, kw_only=True)
class _Config:
    """What decided the figures."""

    run: ServiceRun
    service: Row
    name: str = "service"


def measure_service(config_path: Path, model: str | None, run: ServiceRun, output: Path | None) -> int:
    """Run, save and print; the exit code is 0 if no turn failed, no token differed and the budget held."""
    refuse_without_locust()
    with tempfile.TemporaryDirectory() as scratch:
        config = _with_model(ServiceConfig.load(config_path), model, Path(scratch))
        # The engine with all experts inherits what the replicas are given.
        set_in_this_process(replica_environment(config) | {"PYTHONPATH": python_path(Path(scratch))})
        copies_before = host_copies(config)
        try:
            found = run_service(config, run)
        finally:
            if model is not None:  # written for this run, so nobody will attach to its copy again
                for copy in host_copies(config) - copies_before:
                    shutil.rmtree(copy)
    found.summary["ok"] = is_good(found.summary)
    device = "cuda" if config.replica.num_gpus else "cpu"
    path = output or result_path("service", device)
    write_result(path, _Config(run=run, service=_public(config)), _measured(found.rows, config), found.summary)
    _print(found)
    print_last_line("service", path, found.rows, found.summary)
    return 0 if found.summary["ok"] else 1


def is_good(summary: Row) -> bool:
    """Whether everything that must hold did."""
    return bool(
        summary["requests"] > 0
        and summary["failures"] == summary["identity_mismatches"] == summary["budget_exceeded"] == 0
        and summary["identity_tokens"] > 0
        and len(summary["host_copies"]) <= 1
    )


def _with_model(config: ServiceConfig, model: str | None, scratch: Path) -> ServiceConfig:
    """The configured model, a checkpoint's directory, "tiny" for a small one written here, or a shape's name."""
    if model is None:
        return config
    if model == "tiny":
        write_tiny_model(scratch / "tiny", TinyModelConfig())
        model = str(scratch / "tiny")
    if Path(model).is_dir():
        return config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    return with_made_up_weights(config, model, scratch)


def _measured(rows: list[Row], config: ServiceConfig) -> Measured:
    if not config.replica.num_gpus:
        return Measured.here(rows)
    # Of the GPU torch knows, which is nobody's but an engine's.
    done = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(f"the machine's facts could not be read: {done.stderr[-500:]}")
    return Measured(rows, **json.loads(done.stdout.splitlines()[-1]))


def _public(config: ServiceConfig) -> Row:
    """The parts that decide figures: no paths of this machine, no tenants."""
    replica = config.replica.model_dump(mode="json", exclude={"env"})
    return {
        "model": config.model.name,
        "replica": replica,
        "policy": config.policy.model_dump(mode="json"),
        "routing": config.routing.model_dump(mode="json"),
    }


def _print(found: Found) -> None:
    for kind, columns in (
        ("clients", ("name", "requests", "failures", "median_ms", "p95_ms", "per_s")),
        ("replica", ("replica", "cap", "kv_blocks", "decode_steps", "decode_hit_rate", "ms_per_decode_step")),
        ("memory", ("replica", "budget_bytes", "peak_bytes", "num_samples", "num_exceeded")),
    ):
        print_table(kind, [row for row in found.rows if row["row"] == kind], columns)
