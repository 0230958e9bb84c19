"""`quire pull` and `quire rm`: models of the hub on this disk."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar

from pydantic import Field

from quire.cli.settings import Command
from quire.cli.short_names import resolve, short_names
from quire.cli.values import Flag, Model
from quire.core.errors import QuireError
from quire.core.figures import size


class PullCommand(Command):
    """Downloads models into the Hugging Face cache, but only the files that Quire needs. An
    interrupted download is resumed. A private model needs HF_TOKEN.
    """

    command: ClassVar[str] = "pull"
    summary: ClassVar[str] = "download models from the hub"

    names: Annotated[
        tuple[Model, ...], Flag("OWNER/NAME[:FILE.gguf]", positional=True, several=True)
    ] = Field(
        description="a hub id, or a short name (quire search lists them); of several GGUF models "
        ":FILE.gguf chooses one, or a word of its name such as :Q4_K_M"
    )

    def run(self) -> int:
        """Download each model, and print its location.

        Raises:
            QuireError: a model cannot be downloaded.
        """
        from quire.models.weights.hub import find_folder

        for name in self.names:
            print(f"{name}: {find_folder(resolve(name))}")
        return 0


class RmCommand(Command):
    """Deletes models from the Hugging Face cache. Folders are never deleted."""

    command: ClassVar[str] = "rm"
    summary: ClassVar[str] = "delete models from the hub's cache on this disk"

    names: Annotated[tuple[Model, ...], Flag("OWNER/NAME", positional=True, several=True)] = Field(
        description="a hub id or a short name"
    )
    yes: bool = Field(False, description="delete without asking")

    def run(self) -> int:
        """Delete each model after confirmation. Return 1 if the answer was no.

        Raises:
            QuireError: a model is not in the cache; nothing is deleted then.
        """
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            cache = scan_cache_dir()
        except CacheNotFound as error:
            raise QuireError(
                "there is no Hugging Face cache on this disk, so there is nothing to delete"
            ) from error
        there = {each.repo_id: each for each in cache.repos if each.repo_type == "model"}
        known = short_names()
        names = [known.get(name, name) for name in self.names]
        for name in names:
            if name not in there:
                raise QuireError(
                    f"{name!r} is not in the Hugging Face cache; `quire models` lists the "
                    "models on this disk"
                )
        chosen = [there[name] for name in names]
        total = size(sum(each.size_on_disk for each in chosen))
        if not self.yes and not _sure(f"Delete {', '.join(names)} ({total})?"):
            return 1
        revisions = [revision.commit_hash for each in chosen for revision in each.revisions]
        cache.delete_revisions(*revisions).execute()
        print(f"deleted {total}")
        return 0


def _sure(question: str) -> bool:
    """Ask for confirmation. Raise `QuireError` if nobody can answer."""
    if not sys.stdin.isatty():
        raise QuireError("rm asks before it deletes, and there is no terminal: add --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
