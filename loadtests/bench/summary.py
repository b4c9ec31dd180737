"""What the rows of a run say together. Pure: rows in, figures out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loadtests.bench.modes import BASELINES, Mode, PrefixPlace
from loadtests.rows import Row

_BASELINES = {mode.value for mode in BASELINES}


def decode_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Stretch of every paged row, its gain over the fastest baseline with the same share of experts, and checks.

    The stretch is ``time / (resident time + missed bytes / link)``, the model's bound on a pager without overlap.
    """
    good = [row for row in rows if "error" not in row]
    resident = {row["batch"]: row for row in good if row["mode"] == Mode.RESIDENT}
    paged = [row for row in good if row["mode"] == Mode.PAGED]
    return {
        "paged": [_paged_figures(row, resident.get(row["batch"]), good) for row in paged],
        "are_outputs_equal": _are_equal(good, ("batch",)),
        "are_recounts_equal": all(row["is_recount_equal"] for row in paged if "is_recount_equal" in row),
        "modes": sorted({row["mode"] for row in good}),
    }


def prefill_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Time to the last first token of every paged row against ``passes x bytes not resident / link``, and checks."""
    good = [row for row in rows if "passes" in row]
    figures = []
    for row in good:
        if row["mode"] != Mode.PAGED:
            continue
        bound_ms = _pass_bound_ms(row)
        same = [other for other in good if all(other[key] == row[key] for key in _PREFILL_KEYS)]
        fastest = min((r["last_first_token_ms"] for r in same if r["mode"] in _BASELINES), default=None)
        figures.append(
            {key: row[key] for key in _PREFILL_KEYS}
            | {
                "stretch": row["last_first_token_ms"] / bound_ms if bound_ms else None,
                "gain": fastest / row["last_first_token_ms"] if fastest else None,
            }
        )
    rates = [row for row in rows if "hit_rate_after" in row]
    return {
        "paged": figures,
        "are_outputs_equal": _are_equal(good, _PREFILL_KEYS),
        "hit_rate_change": [row["hit_rate_after"] - row["hit_rate_before"] for row in rates],
    }


def resize_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Longest pause in each direction, and checks."""
    good = [row for row in rows if "error" not in row]
    directions = sorted({row["direction"] for row in good})
    return {
        "max_pause_ms": {name: max(r["pause_ms"] for r in good if r["direction"] == name) for name in directions},
        "bytes_moved": sum(row["bytes_moved"] for row in good),
        "are_all_applied": bool(good) and all(row["outcome"] == "applied" for row in good),
        "are_answers_equal": bool(good) and all(row["is_answer_equal"] for row in good),
    }


def return_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Time to the first token by new tokens and place of the prefix, what fetching saves, and whether answers hold.

    An answer over a fetched prefix must be that over the same prefix left where it was; a computed one went through
    other kernels.
    """
    good = [row for row in rows if "error" not in row]
    by_tokens: dict[str, Any] = {}
    equal = []
    for new_tokens in sorted({row["new_tokens"] for row in good}):
        found = {row["mode"]: row for row in good if row["new_tokens"] == new_tokens}
        by_tokens[str(new_tokens)] = {mode: row["first_token_ms"] for mode, row in found.items()}
        if PrefixPlace.FETCHED in found and PrefixPlace.COMPUTED in found:
            by_tokens[str(new_tokens)]["computed_over_fetched"] = (
                found[PrefixPlace.COMPUTED]["first_token_ms"] / found[PrefixPlace.FETCHED]["first_token_ms"]
            )
        if PrefixPlace.FETCHED in found and PrefixPlace.RESIDENT in found:
            equal.append(found[PrefixPlace.FETCHED]["output_hashes"] == found[PrefixPlace.RESIDENT]["output_hashes"])
    return {"first_token_ms": by_tokens, "are_answers_equal": bool(equal) and all(equal)}


def budget_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether each budget held, how much of it the peak took, and how far the plan was off."""
    good = [row for row in rows if "error" not in row]
    memory = [row for row in good if row["measure"] == "memory"]
    kept = {_budget(row): row["peak_gpu_bytes"] / row["budget_bytes"] for row in memory}
    prefill = [row for row in good if row["measure"] == "first token"]
    return {
        "peak_over_budget": kept,
        "are_budgets_kept": bool(memory) and all(row["is_within_budget"] for row in memory),
        "is_kv_as_planned": {_budget(row): row["is_layout_as_planned"] for row in memory},
        "pass_tokens": {_budget(row): row["pass_tokens"] for row in memory},
        "decode_planned_over_measured": _range(row for row in good if row["measure"] == "decode step"),
        "first_token_planned_over_measured": _range(prefill),
        "first_token_stretch": [
            {key: row[key] for key in ("budget_bytes", "cap", "prompt_tokens", "chunk_tokens")}
            | {"stretch": row["last_first_token_ms"] / _pass_bound_ms(row)}
            for row in prefill
            if row["offloaded_bytes"]
        ],
    }


def _budget(row: Row) -> str:
    return f"{row['budget_bytes'] / 1e9:g} GB"


def _range(rows: Iterable[Row]) -> tuple[float, float] | None:
    """Least and greatest planned over measured time."""
    ratios = [row["planned_over_measured"] for row in rows]
    return (min(ratios), max(ratios)) if ratios else None


def _pass_bound_ms(row: Row) -> float:
    """Passes times bytes that are not resident, over the link."""
    return float(row["passes"] * row["offloaded_bytes"] / row["link_bytes_per_s"] * 1e3)


def identity_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether every paged row gives the answers of the resident engine, with graphs and without."""
    good = [row for row in rows if "error" not in row]
    paged = [row for row in good if row["mode"] == Mode.PAGED]
    return {
        "prompts": max((row["prompts"] for row in good), default=0),
        "caps": sorted({row["cap"] for row in paged}),
        "are_answers_equal": bool(paged) and _are_equal(good, ("has_graphs",)),
        "are_graphs_and_eager_equal": _are_equal(good, ()),
    }


_PREFILL_KEYS = ("batch", "prompt_tokens", "chunk_tokens")


def _paged_figures(row: Row, resident: Row | None, good: Sequence[Row]) -> dict[str, Any]:
    figures = {"batch": row["batch"], "cap": row["cap"], "ms_per_step": row["ms_per_step"]}
    if resident is not None:
        link_ms = row["missed_bytes_per_step"] / row["link_bytes_per_s"] * 1e3
        figures["stretch"] = row["ms_per_step"] / (resident["ms_per_step"] + link_ms)
    rivals = [
        other
        for other in good
        if other["mode"] in _BASELINES and (other["batch"], other["cap"]) == (row["batch"], row["cap"])
    ]
    if rivals:
        fastest = min(rivals, key=lambda other: other["ms_per_step"])
        figures["fastest_baseline"] = fastest["mode"]
        figures["gain"] = fastest["ms_per_step"] / row["ms_per_step"]
        if row["peak_gpu_bytes"] and fastest["peak_gpu_bytes"]:
            figures["peak_over_baseline"] = row["peak_gpu_bytes"] / fastest["peak_gpu_bytes"]
    return figures


def _are_equal(rows: Sequence[Row], keys: Sequence[str]) -> bool:
    """Whether rows that differ in nothing but mode and cap have one answer."""
    hashes: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        hashes.setdefault(tuple(row[key] for key in keys), set()).add(row["output_hash"])
    return bool(hashes) and all(len(found) == 1 for found in hashes.values())
