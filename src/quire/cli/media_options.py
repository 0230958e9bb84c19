"""Options that limit the media and documents of requests, and name allowed sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from pydantic import Field, create_model

from quire.cli.settings import Options
from quire.cli.values import Bytes, Count, Paths, Seconds
from quire.core.config import ServerConfig
from quire.core.errors import QuireError
from quire.media.kinds import inputs

OptionsT = TypeVar("OptionsT", bound=Options)

_SERVER = ServerConfig()
_TYPES: dict[str, Any] = {"bytes": Bytes, "seconds": Seconds}


class MediaOptions(Options):
    """Options for media sources; `with_media_limits` adds size limits."""

    title: ClassVar[str] = "images, sound, video and documents"

    allow_media_hosts: bool = Field(
        False, description="fetch media from http(s) URLs of requests, at public addresses only"
    )
    media_folder: Paths = Field(
        (),
        description="a folder whose files requests may name by file:// URLs; may be given again; "
        "default: none",
    )
    media_timeout: Seconds = Field(
        _SERVER.media_timeout_s, description="time limit for fetching a file, redirects included"
    )

    def media_settings(self) -> dict[str, Any]:
        """Return the fields of `ServerConfig` that these options set.

        Raises:
            QuireError: a media folder does not exist.
        """
        limits: dict[str, dict[str, float]] = {}
        values = dict(self)
        for each in _limits():
            if each.option in values:
                limits.setdefault(each.kind, {})[each.limit] = values[each.option]
        return {
            "media_limits": limits,
            "allow_media_hosts": self.allow_media_hosts,
            "media_folders": tuple(_folder(each) for each in self.media_folder),
            "media_timeout_s": self.media_timeout,
        }


def with_media_limits(options: type[OptionsT]) -> type[OptionsT]:
    """Return a class with these options, and a limit for each registered kind of media."""
    fields: dict[str, Any] = {
        each.option: (
            _TYPES.get(each.limit, Count),
            Field(each.default, description=each.description),
        )
        for each in _limits()
    }
    limits = cast("type[OptionsT]", create_model("MediaLimits", __base__=Options, **fields))
    limits.title = MediaOptions.title
    return create_model(options.__name__, __base__=(options, limits))


class _Limit(NamedTuple):
    """One limit of one kind of media, and the option that sets it."""

    kind: str
    limit: str
    option: str
    default: float
    description: str


def _limits() -> Iterator[_Limit]:
    for kind, each in inputs().items():
        files = f"maximum number of {each.plural} in a request, earlier messages included"
        yield _Limit(
            kind, "files", f"max_{each.name}s", default=each.limits.files, description=files
        )
        for limit, description in {
            "bytes": f"maximum size of one {each.noun}'s file",
            **each.bounds,
        }.items():
            default = getattr(each.limits.each, limit)
            yield _Limit(
                kind, limit, f"max_{each.name}_{limit}", default=default, description=description
            )


def _folder(path: Path) -> str:
    """Return the folder's absolute path.

    Raises:
        QuireError: it is no folder.
    """
    if not path.is_dir():
        raise QuireError(f"--media-folder: '{path}' is not a folder")
    return str(path.resolve())
