"""A model's own ``config.json``, from where vLLM would take it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wisp_core.errors import ConfigurationError


def read_config(model: str) -> dict[str, Any]:
    """A model's ``config.json``, from a directory or by its Hugging Face name. Raises ConfigurationError."""
    path = Path(model) / "config.json"
    if not path.exists():
        path = _downloaded_config(model)
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--model {model}: {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"--model {model}: {path}: holds no JSON object")
    return config


def _downloaded_config(model: str) -> Path:
    if Path(model).exists():
        raise ConfigurationError(f"--model {model}: there is no config.json in it")
    if model.startswith((".", "/", "~")):  # No name on a hub does.
        raise ConfigurationError(f"--model {model}: there is no such directory")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigurationError(f"--model {model}: no such directory, and huggingface_hub is not installed") from error
    try:
        return Path(hf_hub_download(model, "config.json"))
    except LocalEntryNotFoundError as error:
        raise ConfigurationError(
            f"--model {model}: no such directory, and neither cached nor can the Hugging Face hub be reached: give a "
            "local directory, or set HF_HUB_OFFLINE=1 to look among what is cached only"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigurationError(f"--model {model}: neither a directory nor found by name: {error}") from error
