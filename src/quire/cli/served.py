"""Requests of commands to a running server, except for answers, and messages for refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from quire.cli.keys import KEY_VARIABLE
from quire.cli.load import Target, unreachable
from quire.cli.sse_counter import error_message
from quire.core.errors import QuireError
from quire.core.logs import WATCH_HEADER


class ServerError(QuireError):
    """Raised if a server cannot be reached, or refuses."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address, and the key to send.

    Attributes:
        url: with or without `/v1`.
        watching: whether requests are repeated polls, which the server need not log.
    """

    url: str
    key: str | None = None
    watching: bool = False

    @property
    def base(self) -> str:
        """The URL without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server lists, at least one.

        Raises:
            ServerError: the server lists none.
        """
        listed = self._ask("GET", "/v1/models").get("data")
        if not (isinstance(listed, list) and listed and all("id" in each for each in listed)):
            raise ServerError(f"{self.base}/v1/models lists no model")
        return listed

    def model(self, name: str | None = None) -> dict[str, Any]:
        """Return the model of a name, listed or not; without a name the first one.

        Raises:
            ServerError: it is not served.
        """
        listed = self.models()
        if name is None:
            return listed[0]
        for each in listed:
            if each["id"] == name:
                return each
        return self._ask("GET", f"/v1/models/{quote(name)}")

    def load(self, name: str) -> dict[str, Any]:
        """Load a model, however long it takes.

        Raises:
            ServerError: it is not served, or cannot be loaded.
        """
        return self._ask("POST", "/models/load", {"model": name}, timeout_s=None)

    def unload(self, name: str) -> dict[str, Any]:
        """Unload a model as soon as nobody uses it.

        Raises:
            ServerError: it is not served.
        """
        return self._ask("POST", "/models/unload", {"model": name}, timeout_s=None)

    def _ask(
        self, method: str, path: str, body: object = None, timeout_s: float | None = 30
    ) -> dict[str, Any]:
        try:
            Target.parse(self.url)
        except ValueError as error:
            raise ServerError(str(error)) from error
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        if self.watching:
            headers[WATCH_HEADER] = "1"
        try:
            answer = httpx.request(
                method, self.base + path, headers=headers, json=body, timeout=timeout_s
            )
        except httpx.HTTPError as error:
            raise ServerError(unreachable(self.base, error)) from error
        if answer.status_code != 200:
            raise ServerError(refusal(answer.status_code, answer.content, self.key))
        try:
            parsed = answer.json()
        except ValueError as error:
            raise ServerError(f"{self.base}{path} did not answer with JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ServerError(f"{self.base}{path} did not answer with a JSON object")
        return parsed


def refusal(status: int, body: bytes, key: str | None) -> str:
    """Return the message for an error response. A wrong key and a missing key are told apart."""
    if status != 401:
        return error_message(body) or f"HTTP {status}"
    wrong = "does not know this API key: give another" if key else "asks for an API key: give it"
    return f"the server {wrong} by --api-key-file or {KEY_VARIABLE}"
