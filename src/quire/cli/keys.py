"""API keys from where other users of the machine cannot read them."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from quire.core.errors import QuireError

KEY_VARIABLE = "QUIRE_API_KEY"
_SHOWN = "shows in the process list: --api-key-file and " + KEY_VARIABLE + " do not"


def add_client_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of commands that ask a server."""
    parser.add_argument("--api-key", help=f"sent as a bearer token; {_SHOWN}")
    parser.add_argument("--api-key-file", metavar="FILE", help="holds the key")


def add_server_key_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares the options of a server."""
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"may be given again; {_SHOWN}",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"one key a line; also, with commas between, in {KEY_VARIABLE}",
    )


def client_key(args: argparse.Namespace) -> str | None:
    """The key to send: the option's, the file's first, or the environment's first.

    Raises:
        QuireError: the file holds none.
    """
    given: str | None = args.api_key
    return given or key_in(args.api_key_file, "--api-key-file") or next(iter(_variable()), None)


def server_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys that open a server, from everywhere.

    Raises:
        QuireError: the file cannot be read.
    """
    keys = [key.strip() for key in args.api_key]
    if any(keys):
        logging.getLogger("quire").warning("--api-key %s", _SHOWN)
    if args.api_key_file:
        keys += read(args.api_key_file, "--api-key-file").split()
    return tuple(dict.fromkeys(key for key in [*keys, *_variable()] if key))


def key_in(path: str | None, option: str) -> str | None:
    """The first key in a file; None where none is named.

    Raises:
        QuireError: the file holds none.
    """
    if not path:
        return None
    keys = read(path, option).split()
    if not keys:
        raise QuireError(f"{option}: the file is empty")
    return keys[0]


def read(path: str, option: str) -> str:
    """A file's text.

    Raises:
        QuireError: it cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError(f"{option}: {error}") from error


def _variable() -> list[str]:
    return [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip()]
