"""Ray of a service takes commands from nobody else, though it listens on every interface."""

import os
import subprocess
import sys

SERVICE = """
from services.environment import prepare_driver
prepare_driver()
import logging, ray, sys
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20,
         log_to_driver=False, logging_level=logging.ERROR)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
CLIENT = """
import logging, ray, sys
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
print("RAN", ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=30))
"""


def connect(address: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout + done.stderr


def test_an_outsider_runs_no_code() -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE], env=outside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:  # It ends when its standard input is closed.
        assert service.stdout is not None
        address = service.stdout.readline().strip()
        for mode in ("disabled", "token"):
            answer = connect(address, outside | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64})
            assert "RAN" not in answer
            assert "auth" in answer.lower(), "refused for this reason, not for another one"
