"""The architecture page stays true: what it names exists, and each invariant names a test that exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "wisp_core" / "ARCHITECTURE.md"
TEXT = PAGE.read_text()


def defined_tests(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_invariant_names_a_test_that_exists() -> None:
    section = TEXT.split("## Invariants")[1].split("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert len(named) == len(numbers)
    missing = [f"{path}::{test}" for path, test in named if test not in defined_tests(ROOT / path)]
    assert missing == []


def test_the_code_map_names_files_that_exist() -> None:
    section = TEXT.split("## Code map")[1].split("\n## ")[0]
    for row in section.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) != 3 or not cells[0].startswith("`"):
            continue
        places = re.findall(r"`([\w./]+)`", cells[0])
        folder = PAGE.parent / places[0] if places[0].endswith("/") else PAGE.parent
        for place in places + re.findall(r"`([\w/]+(?:\.py|/))`", cells[1]):
            assert (folder / place).exists() or (PAGE.parent / place).exists(), f"{place} in: {row}"


def test_every_package_is_on_the_map() -> None:
    packages = {path.parent.name for path in PAGE.parent.glob("*/__init__.py")}
    assert {name for name in packages if f"| `{name}/` |" not in TEXT} == set()


def test_the_page_stays_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_import_rules_hold() -> None:
    # A process of its own: the linter's logging setup would switch off every logger of this one.
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
