"""vLLM's whole OpenAI server as an ASGI application in this process, without a socket."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from wisp_core.errors import ConfigurationError


def serve_args(model: str, served_name: str, arguments: dict[str, Any]) -> Namespace:
    """vLLM's parsed serve arguments with ``arguments`` set by their Python names.

    Raises ConfigurationError that names every argument unknown to vLLM.
    """
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    unknown = sorted(name for name in arguments if not hasattr(args, name))
    if unknown:
        raise ConfigurationError(f"engine arguments unknown to vLLM: {', '.join(unknown)}")
    for name, value in arguments.items():
        setattr(args, name, _as_config(getattr(args, name), value))
    args.model = args.model_tag = model
    args.served_model_name = [served_name]
    args.enable_prompt_tokens_details = True  # usage then tells how many prompt tokens the prefix cache held
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"engine arguments: {error}") from error
    return args


def _as_config(default: Any, value: Any) -> Any:
    """A mapping given for one of vLLM's config objects becomes such an object. Raises ConfigurationError."""
    if not isinstance(value, dict) or not is_dataclass(default) or isinstance(default, type):
        return value
    try:
        return type(default)(**value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"engine arguments: {error}") from error


async def openai_app(llm: AsyncLLM, args: Namespace) -> Any:
    """Build the application around ``llm``. Raises ConfigurationError."""
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    try:
        await init_app_state(llm, app.state, args, tasks)
    except (KeyError, TypeError, ValueError) as error:  # parsers, templates and the like
        raise ConfigurationError(f"engine arguments: {error}") from error
    # vLLM's error handler asks its own HTTP server to exit when the engine dies; there is none here.
    app.state.server = SimpleNamespace(should_exit=False)
    return app
