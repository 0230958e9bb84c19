"""Types of options: allowed values, and how the command line spells them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from quire.core.unix_sockets import LONGEST_PATH, unix_path


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


PathT = TypeVar("PathT", str, Path)


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line spells an option, if its name and type do not say.

    Attributes:
        metavar: placeholder of the value in the help.
        positional: whether it is given without its name.
        after_dashes: whether it takes all arguments after `--`.
        again: whether it may be repeated, each time with one more value.
        several: whether it takes all values that follow.
        bare: its value if none follows; None requires one.
        former: the name that the flag had in the last release.
        shown: formats its default in the help.
    """

    metavar: str | None = None
    positional: bool = False
    after_dashes: bool = False
    again: bool = False
    several: bool = False
    bare: str | None = None
    former: str = ""
    shown: Callable[[Any], str] = _plain


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def _byte_count(value: object) -> int:
    text = str(value)
    digits = text.rstrip("BbKkMmGgTtIi ")
    try:
        return int(float(digits) * _UNITS[text[len(digits) :].strip().upper()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number of bytes, e.g. 8GB or 512MiB") from None


def _as_bytes(count: int) -> str:
    """Return a byte count in the largest unit that divides it."""
    units = sorted(_UNITS.items(), key=lambda unit: (unit[1], len(unit[0])))
    name, size = [(name, size) for name, size in units if count % size == 0 and count >= size][-1]
    return f"{count // size}{name.replace('I', 'i')}"


def _listed(value: object) -> object:
    """Return the comma-separated parts of a text; a list unchanged."""
    if isinstance(value, (list, tuple)):
        return value
    return [part.strip() for part in str(value).split(",") if part.strip()]


def _listed_or_none(value: object) -> object:
    return () if str(value).strip().lower() == "none" else _listed(value)


def _possible(path: PathT) -> PathT:
    """Return a path unchanged, whether or not it exists."""
    try:
        os.lstat(path)
    except ValueError as error:  # a null character
        raise ValueError(f"{os.fspath(path)[:80]!r} is not a path: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"'{os.fspath(path)[:80]}...' is too long for a path") from None
    return path


def _host(text: str) -> str:
    path = unix_path(text)
    if path is None:
        return text.removeprefix("[").removesuffix("]")
    size = len(os.fsencode(path))
    if not 0 < size <= LONGEST_PATH:
        raise ValueError(
            f"{text[:80]!r} has a path of {size} bytes; that of a Unix socket has 1 to "
            f"{LONGEST_PATH}, e.g. unix:/run/quire/quire.sock"
        )
    return text


def _named(model: str) -> str:
    if not model:
        raise ValueError("the name of the model is empty")
    return model


def _whole(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


def _number_or_auto(value: object) -> int | str:
    text = str(value)
    if text != "auto" and not (text.isdecimal() and 0 < int(text) <= _MOST_PROCESSES):
        raise ValueError(f"{text!r} is neither auto nor a number from 1 to {_MOST_PROCESSES}")
    return text if text == "auto" else int(text)


def _http_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not a URL, e.g. http://localhost:4318")
    return text


def _origin(text: str) -> str:
    """Return an origin as browsers send it, `*` or `null`.

    Raises:
        ValueError: the text is something else; browsers would never send it.
    """
    origin = text.lower().removesuffix("/")
    if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{text!r} is not an origin, e.g. http://localhost:3000; * is any")
    return origin


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#*\s]+")
_MOST_PROCESSES = 1000
_MOST_COUNTED, _MOST_BYTES, _MOST_S = 10**15, 10**18, 1e9
"""Upper bound of counts: more than any machine has, and small enough that products fit 64 bits."""

Count = Annotated[int, Field(ge=1, le=_MOST_COUNTED), Flag("N")]


def _proportions(value: object) -> object:
    if value == "auto":
        return ()
    if not isinstance(value, str):
        return value
    parts = value.split(":")
    if len(parts) < 2 or not all(each.isdecimal() and int(each) for each in parts):
        raise ValueError("say auto, or the proportions of two machines or more, such as 3:1")
    return tuple(map(int, parts))


Proportions = Annotated[tuple[int, ...], BeforeValidator(_proportions), Flag("A:B")]
"""Whole numbers of which each machine gets its part; empty for "auto"."""
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto), Flag("N")]
Port = Annotated[int, Field(ge=0, le=65535)]
Whole = BeforeValidator(_whole)
"""Before a choice of whole numbers."""
Seconds = Annotated[float, Field(gt=0, le=_MOST_S), Flag("SECONDS")]
Bytes = Annotated[
    int,
    BeforeValidator(_byte_count),
    Field(ge=0, le=_MOST_BYTES),
    Flag("BYTES", shown=_as_bytes),
]
"""Written as `8GB`, `512MiB` or `1000`."""
Host = Annotated[str, AfterValidator(_host)]
"""An IPv6 address may have the brackets that it has in a URL; `unix:PATH` is a Unix socket."""
HttpUrl = Annotated[str, AfterValidator(_http_url), Flag("URL")]
PossiblePath = Annotated[Path, AfterValidator(_possible)]
File = Annotated[PossiblePath, Flag("FILE")]
Folder = Annotated[PossiblePath, Flag("DIR")]
Place = Annotated[str, AfterValidator(_possible)]
"""A folder, a file, or the id of a model that is elsewhere."""
Places = Annotated[tuple[Place, ...], BeforeValidator(_listed), Flag(again=True)]
Model = Annotated[Place, AfterValidator(_named)]
"""The same, but not empty, as where a script's variable is not set."""
Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Flag("NAME", again=True)]
"""Given again for each; with commas between in a variable."""
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_origin)], ...],
    BeforeValidator(_listed),
    Flag("ORIGIN", again=True, former="--cors-origins"),
]
Paths = Annotated[tuple[PossiblePath, ...], BeforeValidator(_listed), Flag("DIR", again=True)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_listed), Flag("N,N,...")]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_listed_or_none), Flag("N,N,...")]
"""With commas between, or `none`."""
