"""The options that bound the media and documents of requests, and say where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from pydantic import Field, create_model

from quire.cli.settings import Options
from quire.cli.values import Bytes, Count, Paths, Seconds
from quire.core.config import ServerConfig
from quire.core.errors import QuireError
from quire.media.kinds import inputs

Some = TypeVar("Some", bound=Options)

_SERVER = ServerConfig()
_TYPES: dict[str, Any] = {"bytes": Bytes, "seconds": Seconds}


class MediaOptions(Options):
    """Where media come from; `with_media_limits` adds how much of them may come."""

    title: ClassVar[str] = "images, sound, video and documents"

    allow_media_hosts: bool = Field(
        False, description="fetch media that requests name by http(s), from public addresses"
    )
    media_folder: Paths = Field(
        (),
        description="requests may name media below it by file://; may be given again; "
        "default: none",
    )
    media_timeout: Seconds = Field(
        _SERVER.media_timeout_s, description="for fetching one file, redirects included"
    )

    def media_settings(self) -> dict[str, Any]:
        """The fields of `ServerConfig` that are said here.

        Raises:
            QuireError: a folder is none.
        """
        limits: dict[str, dict[str, float]] = {}
        for kind, limit, name, _, _ in _limits():
            if hasattr(self, name):
                limits.setdefault(kind, {})[limit] = getattr(self, name)
        return {
            "media_limits": limits,
            "allow_media_hosts": self.allow_media_hosts,
            "media_folders": tuple(_folder(each) for each in self.media_folder),
            "media_timeout_s": self.media_timeout,
        }


def with_media_limits(options: type[Some]) -> type[Some]:
    """The options, and one for each limit of each registered kind of media."""
    fields: dict[str, Any] = {
        name: (_TYPES.get(limit, Count), Field(default, description=told))
        for _, limit, name, default, told in _limits()
    }
    limits = cast("type[Some]", create_model("MediaLimits", __base__=Options, **fields))
    limits.title = MediaOptions.title
    return create_model(options.__name__, __base__=(options, limits))


def _limits() -> Iterator[tuple[str, str, str, float, str]]:
    """Kind, limit, option's name, default and description."""
    for kind, each in inputs().items():
        files = f"{each.plural} of one request, earlier messages included"
        yield kind, "files", f"max_{each.name}s", each.limits.files, files
        for limit, told in {"bytes": f"of one {each.noun}'s file", **each.bounds}.items():
            default = getattr(each.limits.each, limit)
            yield kind, limit, f"max_{each.name}_{limit}", default, told


def _folder(path: Path) -> str:
    """The folder's absolute path.

    Raises:
        QuireError: it is no folder.
    """
    if not path.is_dir():
        raise QuireError(f"--media-folder: '{path}' is no folder")
    return str(path.resolve())
