"""The one file that reads or sets environment variables: what Ray, Serve and vLLM take only from there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from services.config import ServiceConfig

_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would hide the GPUs of a process that asks for none, and warns that it does.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_MESSAGES = {
    # An ingress and a replica speak by gRPC, whose default of 4 MiB is less than an answer with log-probabilities has.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
}
_INGRESS = {
    # One event loop for Serve, its router and the app, which would else hand each turn from thread to thread.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
_VLLM = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # The replica lives on when its engine dies: it restarts it.
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TOKENIZERS_PARALLELISM": "false",
}
_VLLM_CPU = {
    # "auto" pins the workers of several replicas to the same core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # oneDNN keeps a kernel for every batch shape it meets, 1,024 by default: in time 0.4 GB in each engine.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    # The pools come from the arena; this only satisfies vLLM's own check of the CPU's memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def prepare_driver() -> None:
    """Set what must hold before Ray is imported or started; what the operator has set stays.

    Ray's own servers listen on every interface of the machine and run whatever code they are sent. A token of this
    run, known to this process and its children only, closes them to everybody else. A cluster that is joined has its
    own, which Ray finds.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if joined_cluster() is None else {}
    for name, value in (_RAY | token).items():
        os.environ.setdefault(name, value)


def joined_cluster() -> str | None:
    """Ray's own ``RAY_ADDRESS``: the cluster that a service joins. None: it starts one."""
    address = os.environ.get("RAY_ADDRESS", "local")
    return None if address in ("", "local") else address


def serve_environment() -> dict[str, str]:
    """Variables of Serve's own processes on a cluster that is joined; on one of its own they inherit the driver's."""
    return _with_defaults(_RAY | _MESSAGES)


def engine_environment(*, is_cpu: bool, is_local_model: bool, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a process that runs vLLM: defaults, then the operator's environment, then ``extra``."""
    defaults = _VLLM | (_VLLM_CPU if is_cpu else {}) | (_OFFLINE if is_local_model else {})
    return _with_defaults(defaults) | dict(extra or {})


def message_environment() -> dict[str, str]:
    """Variables of whoever sends or gets Serve's messages; what the operator has set stays."""
    return _with_defaults(_MESSAGES)


def ingress_environment() -> dict[str, str]:
    """Variables of every ingress; what the operator has set stays."""
    return _with_defaults(_MESSAGES | _INGRESS)


def replica_environment(config: ServiceConfig) -> dict[str, str]:
    """Variables of every replica of ``config``."""
    return engine_environment(
        is_cpu=config.replica.num_gpus == 0,
        is_local_model=Path(config.model.path).is_dir(),
        extra=message_environment() | config.replica.env,
    )


def set_in_this_process(variables: Mapping[str, str]) -> None:
    """For a process that builds an engine itself; call it before vLLM is imported."""
    os.environ.update(variables)


def _with_defaults(defaults: Mapping[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
