"""``wisp tenant``: tenants of a running service, by its admin API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from wisp_core.errors import ConfigurationError
from wisp_core.tenant_contracts import TenantLimits

app = typer.Typer(no_args_is_help=True, help="Tenants of a running service. Changes take effect within two seconds.")

StateDir = Annotated[Path, typer.Option(help="The service's state directory.")]
Name = Annotated[str, typer.Argument(help="The tenant's id.")]
Requests = Annotated[int | None, typer.Option(help="Requests per minute.")]
Tokens = Annotated[int | None, typer.Option(help="Prompt plus requested output tokens per minute.")]
Turns = Annotated[int | None, typer.Option(help="Turns at once.")]
Weight = Annotated[float | None, typer.Option(help="Share of engine time against other tenants' weights.")]
KvShare = Annotated[float | None, typer.Option(help="Largest part of a replica's KV and batch, up to 1.")]


@app.command()
def add(
    context: typer.Context,
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    max_concurrent_turns: Turns = None,
    weight: Weight = None,
    kv_share: KvShare = None,
    state_dir: StateDir = Path(".wisp"),
) -> None:
    """Add a tenant and print its key, once."""
    typer.echo(_call(state_dir, "POST", "", {"tenant_id": name, **_limits(context)})["key"])


@app.command(name="list")
def list_all(state_dir: StateDir = Path(".wisp")) -> None:
    """Show every tenant's limits and usage."""
    print_tenants(_call(state_dir, "GET")["tenants"], Console())


def print_tenants(tenants: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a few lines for each of ``tenants``: twelve figures do not fit into columns."""
    from services.cli.status import print_entry

    for one in tenants:
        usage = one["usage"]
        source = "the file" if one["is_from_file"] else "the admin API"
        print_entry(
            console,
            f"{one['tenant_id']}  from {source}, {one['isolation']}; keys {' '.join(one['keys']) or 'none'}",
            f"{_limits_of(one)}\n"
            f"{usage['turns']} turns done, {usage['failed_turns']} of them failed; "
            f"{usage['prompt_tokens'] + usage['completion_tokens']} tokens used",
        )


def _limits_of(tenant: dict[str, Any]) -> str:
    return (
        f"{tenant['requests_per_minute']} requests/min, {tenant['tokens_per_minute']} tokens/min, "
        f"{tenant['max_concurrent_turns']} turns at once; weight {tenant['weight']:g}, KV share {tenant['kv_share']:g}"
    )


@app.command()
def rotate(
    name: Name,
    keep_old: Annotated[bool, typer.Option(help="The old keys go on until the next rotation without this.")] = False,
    state_dir: StateDir = Path(".wisp"),
) -> None:
    """Give a tenant a new key, print it once, and end the old ones."""
    typer.echo(_call(state_dir, "POST", f"/{quote(name, safe='')}/rotate", {"keep_old": keep_old})["key"])


@app.command()
def limit(
    context: typer.Context,
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    max_concurrent_turns: Turns = None,
    weight: Weight = None,
    kv_share: KvShare = None,
    state_dir: StateDir = Path(".wisp"),
) -> None:
    """Set limits and print all; what is left out stays. For a tenant of the file: until the service starts again."""
    limits = _limits(context)
    if not limits:
        raise ConfigurationError("give at least one limit, such as --weight 2")
    tenant = _call(state_dir, "PATCH", f"/{quote(name, safe='')}", limits)
    typer.echo(f"{name}: {_limits_of(tenant)}")


@app.command()
def rm(name: Name, state_dir: StateDir = Path(".wisp")) -> None:
    """Remove a tenant and its keys; its running turns finish."""
    _call(state_dir, "DELETE", f"/{quote(name, safe='')}")
    typer.echo(f"{name}: removed")


def _limits(context: typer.Context) -> dict[str, Any]:
    """Those that the command line gives."""
    given = {name: value for name, value in context.params.items() if value is not None}
    return {name: given[name] for name in TenantLimits.model_fields if name in given}


def _call(state_dir: Path, method: str, path: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One admin request. Raises ConfigurationError with the service's own words, EngineUnavailableError if none."""
    from services.cli.operator import Operator

    service = Operator(state_dir)
    response = service.request(method, f"/wisp/tenants{path}", json=body)
    if response.is_success:
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError):
        message = f"{service.url} answered {response.status_code}"
    raise ConfigurationError(message)
