"""The operator's side of a running service: its HTTP interface, with the admin key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from services.secret_files import read_or_create, secret_path
from services.service_file import is_owned, read_service_file
from wisp_core.errors import EngineUnavailableError

_TIMEOUT_S = 10.0


class Operator:
    """Whoever may read the files of ``state_dir``."""

    def __init__(self, state_dir: Path) -> None:
        """Raises ConfigurationError when no service runs there."""
        self._state_dir = state_dir
        self.facts = read_service_file(state_dir)
        self.url: str = self.facts["url"]
        self._headers = {"Authorization": f"Bearer {read_or_create(secret_path(state_dir, 'admin'))}"}

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer, whatever it says. Raises EngineUnavailableError when none comes."""
        try:
            # Not by a proxy that the environment names: the service is here.
            return httpx.request(
                method, self.url + path, headers=self._headers, timeout=_TIMEOUT_S, trust_env=False, **options
            )
        except httpx.RequestError as error:
            # A service that was killed leaves its file behind.
            why = "" if is_owned(self._state_dir) else f": no service runs with state_dir {self._state_dir} any more"
            raise EngineUnavailableError(f"{self.url} does not answer: {error}{why}") from error

    def read(self, path: str, **params: Any) -> httpx.Response:
        """A page. Raises EngineUnavailableError when it does not come."""
        try:
            return self.request("GET", path, params=params).raise_for_status()
        except httpx.HTTPStatusError as error:
            raise EngineUnavailableError(f"{self.url} does not answer: {error}") from error
