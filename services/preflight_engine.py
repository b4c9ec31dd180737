"""What the model's own config.json and vLLM's source tell of a replica's settings before an engine starts.

Only what is certain is refused here; an engine checks the rest, half a minute later.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.config import ModelSettings, PolicySettings, ReplicaSettings
from wisp_core.errors import ConfigurationError, UnsupportedModelError
from wisp_core.pager.support import refuse_misplaced, refused_arguments, refused_experts
from wisp_core.planner.model_shape import ModelShape, read_shape

_SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
"""Files of vLLM whose classes ``*Args`` hold the names of all serve arguments."""
_PARSERS = {
    "tool_call_parser": ("tool_parsers/__init__.py", "tool_parser_plugin"),
    "reasoning_parser": ("reasoning/__init__.py", "reasoning_parser_plugin"),
}
"""Arguments that name a parser: vLLM's file that registers them, and the argument that adds others."""
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_LONGER_THAN_THE_MODEL = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
"""A number that YAML may have left a text: 1e-3."""
_DENSE_SURE = 0.9
"""Part of the dense weights, as read from config.json, that an engine has for certain."""


def check_engine(model: ModelSettings, replica: ReplicaSettings, policy: PolicySettings) -> None:
    """Raises ConfigurationError for settings that the model at ``model.path`` or vLLM cannot have."""
    check_arguments(replica)
    refuse_misplaced(
        "replica",
        prefetch=replica.prefetch,
        emulated_link_bytes_per_s=replica.emulated_link_bytes_per_s,
        is_on_gpu=replica.num_gpus > 0,
    )
    if (found := _shape_of(model, replica)) is None:
        return  # On the hub, or a layout that only vLLM may know.
    config, shape = found
    check_experts(shape, replica)
    check_caps(shape, replica, policy)
    max_model_len = _max_model_len(config, shape, replica)
    check_budget(shape, replica, kv_tokens=0 if config.get("sliding_window") else max_model_len)


def check_arguments(replica: ReplicaSettings) -> None:
    """Raises ConfigurationError for engine arguments, all at once, that vLLM does not have or that cannot be."""
    types = argument_types()
    problems = [f"replica.engine.{name}: {why}" for name, why in sorted(refused_arguments(replica.engine).items())]
    if (dtype := replica.engine.get("dtype")) is not None and dtype not in _DTYPES:
        problems.append(f"replica.engine.dtype: vLLM has no {dtype!r}; it has {', '.join(_DTYPES)}")
    for name, value in sorted(replica.engine.items()) if types else ():
        problem = _type_problem(types[name], value) if name in types else _unknown(name, types)
        if problem is None and name == "max_model_len" and value is not None and not (value >= 1 or value == -1):
            problem = f"takes 1 token or more, or -1 for as many as fit, not {value!r}"
        if problem is None and name in _PARSERS:
            problem = _parser_problem(name, value, replica)
        if problem is not None:
            problems.append(f"replica.engine.{name}: {problem}")
    if problems:
        raise ConfigurationError("\n".join(problems))


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return "unknown to vLLM" + (
        f"; did you mean {near[0]}?" if near else "; give the Python name of an argument of `vllm serve`"
    )


def _type_problem(annotation: str, value: Any) -> str | None:
    """What is wrong with ``value`` for a plain number or flag; None: nothing, or only vLLM can tell."""
    wanted = {part.strip() for part in annotation.split("|")} - {"None"}
    if value is None or wanted not in ({"int"}, {"float"}, {"bool"}):
        return None
    if wanted == {"bool"}:
        is_taken, takes = isinstance(value, bool) or value in (0, 1), "true or false"
    else:
        takes = "a whole number" if wanted == {"int"} else "a number"
        if isinstance(value, str):  # An engine gets Python values, not the command line's 32k and auto.
            is_taken = wanted == {"float"} and _FLOAT.fullmatch(value) is not None
        else:
            is_taken = isinstance(value, int | float) and not isinstance(value, bool)
            is_taken = is_taken and (wanted == {"float"} or value == int(value))
    return None if is_taken else f"takes {takes}, not {value!r}"


def _parser_problem(name: str, value: Any, replica: ReplicaSettings) -> str | None:
    source, plugin = _PARSERS[name]
    known = _registered(source)
    if not value or not known or value in known or replica.engine.get(plugin):
        return None
    near = difflib.get_close_matches(str(value), known, n=1)
    return f"vLLM has no {value!r}" + (f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(known))}")


@functools.cache
def _vllm_file(name: str) -> ast.Module | None:
    """A file of vLLM, parsed: importing it takes seconds. None if it is not there."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / name
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _registered(source: str) -> frozenset[str]:
    """Keys of the dictionaries that the top of ``source`` assigns: the parsers that vLLM brings."""
    file = _vllm_file(source)
    dictionaries = (one.value for one in file.body if isinstance(one, ast.Assign)) if file is not None else ()
    keys = (key for one in dictionaries if isinstance(one, ast.Dict) for key in one.keys)
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@functools.cache
def argument_types() -> dict[str, str]:
    """Annotations of vLLM's serve arguments by their Python names, "" if it has none. Empty if not found."""
    types: dict[str, str] = {}
    for source in _SOURCES:
        file = _vllm_file(source)
        if file is None:
            return {}
        for node in ast.walk(file):
            types |= {name: kind for name, kind in _arguments_in(node).items() if kind or name not in types}
    return types


def _arguments_in(node: ast.AST) -> dict[str, str]:
    """Fields of a class ``*Args``, or the option that a call of ``add_argument`` adds."""
    if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
        fields = (one for one in node.body if isinstance(one, ast.AnnAssign))
        return {one.target.id: ast.unparse(one.annotation) for one in fields if isinstance(one.target, ast.Name)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        options = (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))
        return {option.removeprefix("--").replace("-", "_"): "" for option in options if option.startswith("--")}
    return {}


def _shape_of(model: ModelSettings, replica: ReplicaSettings) -> tuple[dict[str, Any], ModelShape] | None:
    path, engine = Path(model.path) / "config.json", replica.engine
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        shape = read_shape(
            config, name=model.path, dtype=engine.get("dtype"), kv_dtype=str(engine.get("kv_cache_dtype", "auto"))
        )
    except UnsupportedModelError as error:
        if _has_no_experts(config):
            raise ConfigurationError(f"model.path: {error}; a plain `vllm serve` serves it") from error
        return None
    except (ConfigurationError, ValueError):
        return None
    return config.get("text_config") or config, shape


def _has_no_experts(config: dict[str, Any]) -> bool:
    """Whether a config with the usual sizes names nothing like experts, under whatever name."""
    words = json.dumps(config).lower()
    return "num_hidden_layers" in words and not any(word in words for word in ("expert", "moe"))


def check_experts(shape: ModelShape, replica: ReplicaSettings) -> None:
    """Raises ConfigurationError for experts that no engine can page."""
    setting, quantization = "model.path", shape.quantization if shape.has_quantized_experts else None
    if shape.quantization == "none" and replica.engine.get("quantization"):
        setting, quantization = "replica.engine.quantization", replica.engine["quantization"]
    reasons = refused_experts(
        quantization=quantization,
        has_bias=shape.has_expert_bias,
        num_experts=shape.num_experts,
        is_on_gpu=replica.num_gpus > 0,
    )
    if reasons:
        raise ConfigurationError(f"{setting}: {shape.name} cannot be paged: {'; '.join(reasons)}")


def check_caps(shape: ModelShape, replica: ReplicaSettings, policy: PolicySettings) -> None:
    """Raises ConfigurationError for a cap outside top-k..E."""
    caps: dict[str, Any] = {"replica.initial_cap": replica.initial_cap, "replica.min_cap": replica.min_cap}
    if policy.name == "static_split":
        caps["policy.settings.cap"] = policy.settings.get("cap")
    for setting, cap in caps.items():
        if isinstance(cap, int) and not shape.top_k <= cap <= shape.num_experts:
            raise ConfigurationError(
                f"{setting}: {cap} slots per layer; a token of {shape.name} needs {shape.top_k} experts of "
                f"{shape.num_experts}, so give {shape.top_k} to {shape.num_experts}"
            )


def _max_model_len(config: dict[str, Any], shape: ModelShape, replica: ReplicaSettings) -> int:
    """Tokens of the longest request; 0 if not known. Raises ConfigurationError for more than the model has places."""
    asked = replica.engine.get("max_model_len")
    if not isinstance(asked, int) or isinstance(asked, bool):
        return 0
    is_stretched = config.get("rope_scaling") or (config.get("rope_parameters") or {}).get("factor")
    may_be_longer = is_stretched or {**os.environ, **replica.env}.get(_LONGER_THAN_THE_MODEL, "0") not in ("", "0")
    if 0 < shape.max_positions < asked and not may_be_longer:
        raise ConfigurationError(
            f"replica.engine.max_model_len: {asked} tokens; {shape.name} has positions for {shape.max_positions}, so "
            "give that or less"
        )
    return asked


def check_budget(shape: ModelShape, replica: ReplicaSettings, kv_tokens: int) -> None:
    """Raises ConfigurationError if the budget cannot hold the cap's experts beside one request of ``kv_tokens``."""
    if replica.other_bytes is None:
        other_bytes = shape.dense_bytes + replica.activation_bytes
        unsure_bytes = int((1 - _DENSE_SURE) * shape.dense_bytes)
        other = f"{shape.dense_bytes} of dense weights, {replica.activation_bytes} of activation_bytes"
    else:
        other_bytes, unsure_bytes, other = replica.other_bytes, 0, f"{replica.other_bytes} of other_bytes"
        if other_bytes < _DENSE_SURE * shape.dense_bytes:
            raise ConfigurationError(
                f"replica.other_bytes: {other_bytes} is less than the dense weights take, {shape.dense_bytes}: leave "
                "it out to have it measured"
            )
    kv_bytes = kv_tokens * shape.kv_token_bytes
    slot_bytes = shape.num_moe_layers * shape.expert_bytes
    cap = replica.initial_cap or replica.min_cap or shape.top_k
    needed = other_bytes + kv_bytes + cap * slot_bytes
    if needed - unsure_bytes <= replica.vram_budget_bytes:
        return
    largest = (replica.vram_budget_bytes - other_bytes - kv_bytes) // slot_bytes
    fixes = [f"give {needed} or more ({needed / 1e6:,.0f} MB)"]
    if needed - unsure_bytes - kv_bytes < replica.vram_budget_bytes:
        fixes.append("lower replica.engine.max_model_len")
    if shape.top_k <= largest < (replica.initial_cap or 0):
        fixes.append(f"lower replica.initial_cap to {largest} or less")
    raise ConfigurationError(
        f"replica.vram_budget_bytes: {replica.vram_budget_bytes} is too small for {other}, "
        f"{cap * slot_bytes} of {cap} expert slots in each of {shape.num_moe_layers} layers, and {kv_bytes} of KV "
        f"cache for one request of {kv_tokens} tokens; {', or '.join(fixes)}"
    )
