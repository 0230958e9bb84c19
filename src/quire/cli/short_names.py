"""Short names of models, such as `gemma4:26b`, and their repositories."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire.cli.settings import default_file, did_you_mean, said
from quire.core.errors import QuireError
from quire.core.limited_files import SETTINGS_BYTES, read_limited_text
from quire.demo import NAME, place

_TABLE = Path(__file__).with_suffix(".toml")


def own_table() -> Path:
    """Return the file in which a user adds short names; it need not exist."""
    return default_file().with_name("names.toml")


def short_names() -> Mapping[str, str]:
    """Return locations of models by short name: the package's, overridden by the user's.

    Raises:
        QuireError: the user's file cannot be read, or a value is not text.
    """
    file = own_table()
    try:
        own = tomllib.loads(read_limited_text(file, SETTINGS_BYTES))
    except FileNotFoundError:
        own = {}
    except (OSError, ValueError, RecursionError) as error:
        raise QuireError(f"{file}: {said(error)}") from error
    for name, value in own.items():
        if not isinstance(value, str) or not value:
            raise QuireError(f'{file}: {name!r} must be a folder or a hub id: "owner/name"')
    return {**tomllib.loads(_TABLE.read_text("utf-8")), **own}


def resolve(name: str) -> str:
    """Return the folder, file or hub id of a model.

    Args:
        name: a short name, `quire-demo`, or a folder, file or hub id, which is returned as it is.

    Raises:
        QuireError: the name is unknown; the message suggests the nearest known names.
    """
    if not name or name == NAME or Path(name).expanduser().exists():
        return place(name)
    known = short_names()
    if name in known:
        return place(known[name])
    if "/" in name or name.endswith(".gguf"):
        return name
    raise QuireError(
        f"no model is called {name!r}: give a folder, a hub id (owner/name) or a short name that "
        f"quire search lists{did_you_mean(name, [*known, NAME])}"
    )


def suggestion(hub_id: str) -> str:
    """Return a suggestion to append to the message about an unknown hub id; empty if the id is a
    known one, or nothing is near.
    """
    known = set(_known_ids())
    return "" if hub_id in known else did_you_mean(hub_id, known)


def _known_ids() -> Iterator[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    yield from short_names().values()
    try:
        yield from (each.repo_id for each in scan_cache_dir().repos if each.repo_type == "model")
    except CacheNotFound:
        return
