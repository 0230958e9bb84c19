"""The flags that bound the media and documents of requests, and say where they come from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire.cli.values import byte_count, duration, positive
from quire.core.config import ServerConfig
from quire.core.errors import QuireError
from quire.media.kinds import inputs


def _flags() -> list[tuple[str, str, str, float, str]]:
    """Kind, limit, name, default and help of each flag that bounds media."""
    found: list[tuple[str, str, str, float, str]] = []
    for kind, each in inputs().items():
        files = f"{each.plural} of one request, earlier messages included"
        found.append((kind, "files", f"max_{each.name}s", each.limits.files, files))
        for limit, told in {"bytes": f"of one {each.noun}'s file", **each.bounds}.items():
            default = getattr(each.limits.each, limit)
            found.append((kind, limit, f"max_{each.name}_{limit}", default, told))
    return found


def add_media_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares `--max-images` and its like, and `--media-folder` and its like."""
    add, defaults = group.add_argument, ServerConfig()
    for _, limit, name, default, told in _flags():
        option, told = f"--{name.replace('_', '-')}", f"{told}; default: %(default)s"
        if limit == "bytes":
            mebibytes, rest = divmod(int(default), 1 << 20)
            size = str(int(default)) if rest else f"{mebibytes}MiB"
            add(option, type=byte_count, default=size, metavar="BYTES", help=told)
        elif limit == "seconds":
            told = told.replace("%(default)s", "%(default)g")
            add(option, type=duration, default=default, metavar="SECONDS", help=told)
        else:
            add(option, type=positive, default=default, metavar="N", help=told)
    add(
        "--allow-media-hosts",
        action="store_true",
        help="fetch media that requests name by http(s), from public addresses",
    )
    add(
        "--media-folder",
        action="append",
        default=[],
        metavar="DIR",
        help="requests may name media below it by file://; may be given again; default: none",
    )
    add(
        "--media-timeout",
        type=duration,
        default=defaults.media_timeout_s,
        metavar="SECONDS",
        help="for fetching one file, redirects included; default: %(default)g",
    )


def media_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerConfig` that the flags of `add_media_arguments` set.

    Raises:
        QuireError: a folder is none.
    """
    limits: dict[str, dict[str, float]] = {}
    for kind, limit, name, _, _ in _flags():
        limits.setdefault(kind, {})[limit] = getattr(args, name)
    return {
        "media_limits": limits,
        "allow_media_hosts": args.allow_media_hosts,
        "media_folders": tuple(_folder(each, "--media-folder") for each in args.media_folder),
        "media_timeout_s": args.media_timeout,
    }


def _folder(path: str, option: str) -> str:
    """The folder's absolute path.

    Raises:
        QuireError: it is no folder.
    """
    if not Path(path).is_dir():
        raise QuireError(f"{option}: '{path}' is no folder")
    return str(Path(path).resolve())
