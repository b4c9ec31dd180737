"""What is wrong with a setting, said to whoever wrote it: the setting's name, what it takes, and what it is for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TAKES = {
    "missing": "is needed",
    "json_invalid": "is no JSON",
    "string_type": "takes text",
    "path_type": "takes a path",
    "int_type": "takes a whole number",
    "int_parsing": "takes a whole number",
    "int_from_float": "takes a whole number",
    "float_type": "takes a number",
    "float_parsing": "takes a number",
    "finite_number": "takes a finite number",
    "bool_type": "takes true or false",
    "bool_parsing": "takes true or false",
    "model_type": "takes settings of its own, NAME: VALUE",
    "dict_type": "takes settings of its own, NAME: VALUE",
    "list_type": "takes a list",
    "tuple_type": "takes a list",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """A line for each setting of ``model`` that is wrong. Texts that were given are not repeated: they may be keys."""
    return [_line(one, model) for one in error.errors(include_url=False)]


def what_is_wrong(details: ErrorDetails) -> str:
    """One error without its setting's name."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]:g}, not {details['input']!r}"
    if kind == "enum":
        return f"takes one of {context['expected'].replace(' or ', ', ')}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    if kind == "too_short":
        return f"needs at least {context['min_length']}"
    if kind == "value_error":
        return str(context["error"])
    return _TAKES.get(kind, details["msg"])


def _line(details: ErrorDetails, model: type[BaseModel]) -> str:
    if details["type"] == "value_error" and not details["loc"]:
        return what_is_wrong(details)  # Says of itself which settings do not go together.
    if not details["loc"] and details["input"] is None:
        return "the file is empty"
    name = ".".join(map(str, details["loc"])) or "the file"
    section, field = _find(model, details["loc"][:-1]), str(details["loc"][-1]) if details["loc"] else ""
    if details["type"] == "extra_forbidden":
        known = list(section.model_fields) if section else []
        near = difflib.get_close_matches(field, known, n=1)
        return f"{name}: no such setting; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
    about = section.model_fields[field].description if section and field in section.model_fields else None
    if details["type"] == "value_error":
        about = None
    return f"{name}: {what_is_wrong(details)}" + (f" ({about.rstrip('.')})" if about else "")


def _find(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel] | None:
    """The section at ``path``; None where settings have no fixed names."""
    section: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation if section and part in section.model_fields else None
        section = _section_in(annotation)
    return section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section in ``Section``, ``Section | None`` or ``tuple[Section, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in getattr(annotation, "__args__", ()) if (found := _section_in(one))), None)
