"""``wisp serve``: one service in the foreground."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from functools import partial
from pathlib import Path
from types import FrameType

import typer
from pydantic import ValidationError

from services.app import Service
from services.cli.upgrade import Upgrades
from services.config import RedisSettings, ServiceConfig
from services.logs import LOG_FORMAT
from services.preflight import checked_start, warnings_of
from services.setting_errors import what_is_wrong
from services.start_progress import progress_to
from wisp_core.errors import ConfigurationError

_TEND_PERIOD_S = 0.5


def load_config(path: Path, redis_url: str | None = None) -> ServiceConfig:
    """The configuration in ``path``, with another Redis if one is given. Raises ConfigurationError."""
    config = ServiceConfig.load(path)
    if redis_url is None:
        return config
    try:
        redis = RedisSettings.model_validate({**config.redis.model_dump(), "url": redis_url})
    except ValidationError as error:
        raise ConfigurationError(f"--redis-url: {what_is_wrong(error.errors()[0])}") from error
    return config.model_copy(update={"redis": redis})


def serve_until_stopped(path: Path, redis_url: str | None) -> None:
    """Serve until SIGINT or SIGTERM, then stop cleanly. Raises ConfigurationError."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    config = load_config(path, redis_url)
    interrupted = interrupt_by_signals()
    with checked_start(config), contextlib.ExitStack() as stack:
        service = Service(config, on_checked=partial(announce_start, config))
        with progress_to(lambda line: typer.echo(f"wisp: {line}", err=True), until=interrupted):
            stack.enter_context(service)
        stopped = catch_stop_signals()
        upgrades = Upgrades(service, partial(load_config, redis_url=redis_url))
        announce(service)
        while not stopped.wait(_TEND_PERIOD_S):
            service.tend()
            upgrades.look()
        typer.echo("wisp: stopping", err=True)


def interrupt_by_signals() -> threading.Event:
    """Have SIGINT and SIGTERM interrupt the start, set this and say so: stopping what was started takes seconds."""
    interrupted = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        typer.echo("wisp: interrupted, stopping", err=True)
        signal.default_int_handler(signum, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    return interrupted


def catch_stop_signals() -> threading.Event:
    """The event that SIGINT or SIGTERM sets; a second one interrupts as usual."""
    stopped = threading.Event()

    def stop(signum: int, _: FrameType | None) -> None:
        stopped.set()
        signal.signal(signum, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopped


def announce_start(config: ServiceConfig) -> None:
    """Print what starts now, and what of it may not be meant."""
    for warning in warnings_of(config):
        typer.echo(f"wisp: warning: {warning}", err=True)
    replicas = "1 replica" if config.num_replicas == 1 else f"{config.num_replicas} replicas"
    typer.echo(f"wisp: starting {replicas} of {config.model.name}", err=True)


def announce(service: Service) -> None:
    """Print where the service is and a line to talk to it."""
    key_file = next((tenant.key_file for tenant in service.config.tenants if tenant.key_file is not None), None)
    key = f'"$(cat {key_file})"' if key_file is not None else "KEY"
    body = f'{{"model": "{service.config.model.name}", "messages": [{{"role": "user", "content": "hello"}}]}}'
    typer.echo(f"wisp: serving at {service.url}/v1", err=True)
    typer.echo(
        f"curl {service.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-H 'Authorization: Bearer '{key} -d '{body}'",
        err=True,
    )
