"""Runs the GPU tests of the plan and gather kernels under Triton's interpreter, so that a machine without a GPU does.

Triton decides at import whether to interpret, and vLLM imports it too: hence a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

GPU_TESTS = Path(__file__).parents[1] / "gpu"


@pytest.mark.parametrize(
    ("file", "at_least"),
    [
        ("test_device_plan.py", 80),
        ("test_device_gather.py", 15),
        ("test_device_pager.py", 9),
        ("test_device_prefetch.py", 11),
        ("test_device_uses.py", 3),
    ],
)
def test_kernels_under_the_interpreter(file: str, at_least: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GPU_TESTS / file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert passed is not None
    assert int(passed[1]) >= at_least, run.stdout[-500:]
