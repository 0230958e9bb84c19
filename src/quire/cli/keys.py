"""API keys from where other users of the machine cannot read them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from quire.cli.files import read
from quire.cli.settings import Options
from quire.cli.values import File, Flag, Names
from quire.core.errors import QuireError

KEY_VARIABLE = "QUIRE_API_KEY"
_SHOWN = "shows in the process list: --api-key-file and " + KEY_VARIABLE + " do not"


class ClientOptions(Options):
    """The options of commands that ask a server."""

    url: str = Field("http://127.0.0.1:8000", description="server")
    api_key: Annotated[str | None, Flag("KEY")] = Field(
        None, description=f"sent as a bearer token; {_SHOWN}"
    )
    api_key_file: File | None = Field(None, description="holds the key")

    @property
    def key(self) -> str | None:
        """The key to send: the option's, the file's first, or the environment's first.

        Raises:
            QuireError: the file holds none.
        """
        in_file = key_in(self.api_key_file, "--api-key-file")
        return self.api_key or in_file or next(iter(_variable()), None)


class KeyOptions(Options):
    """The API keys that a server accepts."""

    title: ClassVar[str] = "access"

    api_key: Annotated[Names, Flag("KEY", again=True)] = Field(
        (), description=f"may be given again; {_SHOWN}"
    )
    api_key_file: File | None = Field(
        None, description=f"one key a line; also, with commas between, in {KEY_VARIABLE}"
    )

    def accepted_keys(self) -> tuple[str, ...]:
        """Return the keys of the options, the file and the environment, each once.

        Raises:
            QuireError: the file cannot be read or holds none, or a key is empty, as where a
                script's variable is not set: nothing would be guarded.
        """
        keys = [key.strip() for key in self.api_key]
        if not all(keys):
            raise QuireError("--api-key: the key is empty")
        if keys:
            logging.getLogger("quire").warning("--api-key %s", _SHOWN)
        keys += _keys_in(self.api_key_file, "--api-key-file")
        return tuple(dict.fromkeys([*keys, *_variable()]))


def key_in(path: Path | None, option: str) -> str | None:
    """Return the first key in a file; None where none is named.

    Raises:
        QuireError: the file holds none.
    """
    return next(iter(_keys_in(path, option)), None)


def _keys_in(path: Path | None, option: str) -> list[str]:
    if path is None:
        return []
    if not (keys := read(path, option).split()):
        raise QuireError(f"{option}: the file is empty")
    return keys


def _variable() -> list[str]:
    return [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip()]
