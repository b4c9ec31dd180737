"""Project files agree with each other: README's tree, its commands, the pinned set, the names in the package."""

import re
import subprocess
import tomllib
from collections import Counter
from importlib.metadata import distributions, entry_points
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def tree_paths() -> list[str]:
    """Paths of README's annotated tree: two spaces of indentation per folder."""
    block = re.search(r"```text\n(services/.*?)```", README, re.DOTALL)
    assert block is not None, "README has no tree"
    paths, folders = [], []
    for line in block.group(1).splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def test_every_path_of_the_tree_exists() -> None:
    paths = tree_paths()
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_tree_shows_every_package() -> None:
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in ("services", "wisp_core", "policies", "loadtests")
        for path in (ROOT / top).glob("*/__init__.py")
    }
    assert packages - set(tree_paths()) == set()


def test_every_make_verb_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test", "check", "soak", "bench", "clean"} <= verbs
    assert [verb for verb in sorted(verbs) if not re.search(rf"^{verb}:", makefile, re.MULTILINE)] == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by name alone, so that a second one would end the collection of both."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("page", ["README.md", "loadtests/results/README.md", "policies/GUIDE.md"])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert [one for one in targets if "://" not in one and not (ROOT / page).parent.joinpath(one).exists()] == []


def test_every_result_is_told_of() -> None:
    pages = README + (ROOT / "loadtests/results/README.md").read_text()
    assert [one.name for one in (ROOT / "loadtests/results").glob("*.json") if one.name not in pages] == []


def test_the_pinned_set_is_exact_and_satisfies_the_metadata() -> None:
    lines = [line for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    canonical = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["cpu"] + extras["load"] + extras["dev"]
    for requirement in map(Requirement, wanted):
        version = canonical[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is pinned to {version}"


def test_the_plugin_that_vllm_loads_exists() -> None:
    points = entry_points(group="vllm.general_plugins")
    (own,) = [point for point in points if point.dist is not None and point.dist.name == "wisp"]
    assert (ROOT / Path(*own.module.split("."))).with_suffix(".py").exists()


def test_the_lines_of_readme_supply_the_metadata_that_vllm_serve_asks_for(tmp_path: Path) -> None:
    lines = re.findall(r"^(?:mkdir -p|printf) .*shim/.*$", README, re.MULTILINE)
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=tmp_path, check=True)
    (found,) = distributions(name="vllm", path=[str(tmp_path / ".wisp" / "shim")])
    assert found.version == "0.32.0+cpu"


def test_the_tenant_commands_of_readme_reach_the_service_that_it_starts() -> None:
    commands = re.findall(r"^wisp tenant .*$", README, re.MULTILINE)
    assert len(commands) == 5
    declared = {one["tenant_id"] for one in yaml.safe_load((ROOT / "infra/serve/demo.yaml").read_text())["tenants"]}
    named = {command.split()[3] for command in commands if command.split()[2] != "list"}
    assert len(named) == 1
    assert not named & declared, "what the file declares is neither added nor removed beside it"
    assert all("--state-dir .wisp/demo" in one for one in commands)
