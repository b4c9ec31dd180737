"""The architecture page stays true: what it names exists, and each invariant names tests that exist."""

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


def test_each_invariant_names_tests_that_exist() -> None:
    section = TEXT.split("## Invariants")[1].split("\n## ")[0]
    _, *parts = re.split(r"^(\d+)\. ", section, flags=re.MULTILINE)
    assert parts[::2] == [str(number) for number in range(1, len(parts) // 2 + 1)]
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        named = re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", text)
        assert named, f"invariant {number} names no test"
        assert named[0][0], f"invariant {number} names a test without its file"
        place = ""
        for path, test in named:
            place = path or place
            assert test in defined_tests(ROOT / place), f"invariant {number}: {place}::{test}"


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
