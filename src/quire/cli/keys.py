"""API keys from places that other users of the machine cannot read."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.cli.files import read
from quire.cli.settings import Options
from quire.cli.values import Count, File, Flag, Names
from quire.core.config import KeyLimits
from quire.core.errors import QuireError

KEY_VARIABLE = "QUIRE_API_KEY"
_FIELDS = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
    "share": "share",
}
_LIMITS = "requests-per-minute=N, tokens-per-minute=N or share=N, separated by blanks"
_SHOWN = "is visible in the process list: prefer --api-key-file or " + KEY_VARIABLE


class ClientOptions(Options):
    """The options of commands that send requests to a server."""

    url: str = Field("http://127.0.0.1:8000", description="server")
    api_key: Annotated[str | None, Flag("KEY")] = Field(
        None, description=f"API key, sent as a bearer token; {_SHOWN}"
    )
    api_key_file: File | None = Field(None, description="file that holds the API key")

    @property
    def key(self) -> str | None:
        """The key to send: from the option, else the first in the file, else from the environment.

        Raises:
            QuireError: the file holds none.
        """
        in_file = key_in(self.api_key_file, "--api-key-file")
        return self.api_key or in_file or next(iter(_variable()), None)


class KeyOptions(Options):
    """The API keys that a server accepts."""

    title: ClassVar[str] = "access"

    api_key: Annotated[Names, Flag("KEY", again=True)] = Field(
        (), description=f"API key that clients must send; may be given again; {_SHOWN}"
    )
    api_key_file: File | None = Field(
        None,
        description="file of API keys, one a line, each optionally followed by its own limits, "
        f"{_LIMITS}; keys without limits can also be set in {KEY_VARIABLE}, separated by commas",
    )
    requests_per_minute: Count | None = Field(
        None, description="requests a minute of each API key, beyond which it gets a 429"
    )
    tokens_per_minute: Count | None = Field(
        None, description="tokens a minute of each API key, of prompts and answers together"
    )

    @property
    def default_limits(self) -> KeyLimits:
        """The limits of keys without their own."""
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute)

    def accepted_keys(self) -> dict[str, KeyLimits]:
        """Return the keys of the options, the file and the environment, with their limits.

        Raises:
            QuireError: the file cannot be read or has no key, or a key is empty, for instance
                because a script's variable is not set.
        """
        keys = [key.strip() for key in self.api_key]
        if not all(keys):
            raise QuireError("--api-key: the key is empty")
        if keys:
            logging.getLogger("quire").warning("--api-key %s", _SHOWN)
        default = self.default_limits
        found = dict.fromkeys(keys, default)
        if self.api_key_file is not None:
            for line in _lines(self.api_key_file, "--api-key-file"):
                key, *words = line.split()
                found[key] = _limits(words, default)
        return found | {key: default for key in _variable() if key not in found}


def key_in(path: Path | None, option: str) -> str | None:
    """Return the first key in a file; None if no file is given.

    Raises:
        QuireError: the file holds none.
    """
    return next(iter(_keys_in(path, option)), None)


def _keys_in(path: Path | None, option: str) -> list[str]:
    return [] if path is None else " ".join(_lines(path, option)).split()


def _lines(path: Path, option: str) -> list[str]:
    if not (lines := [line for line in read(path, option).splitlines() if line.strip()]):
        raise QuireError(f"{option}: the file is empty")
    return lines


def _limits(words: Sequence[str], default: KeyLimits) -> KeyLimits:
    """Return the limits written after a key in its file."""
    given: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        field = _FIELDS.get(name)
        try:
            number = float(value) if name == "share" else int(value)
        except ValueError:
            number = 0
        if field is None or not 0 < number < 10**15:
            raise QuireError(f"--api-key-file: a key can be followed by limits, {_LIMITS}")
        given[field] = number
    return replace(default, **given)


def _variable() -> list[str]:
    return [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip()]
