"""Media of a request that is read in a job. Its features stay in the server's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.core.media import MediaItem, PlacedMedia
from quire.media.parts import FileKey, Parts
from quire.serving.generation import Prepared
from quire.serving.placing import Prompt

if TYPE_CHECKING:
    from quire.media.processors.base import MediaProcessor


class JobMedia:
    """The server's media for one request's job. The job gets items without features.

    Args:
        processors: the model's media processors, by kind. They cache recently read files.
    """

    def __init__(self, processors: Mapping[str, MediaProcessor]) -> None:
        self._processors = processors
        self._items: dict[bytes, MediaItem] = {}
        """The items that the job was given, features included, by digest."""

    @property
    def answers(self) -> dict[str, Callable[..., object]]:
        """Return the answers to a job's questions, for `Jobs.run`: looking up files and storing
        them.
        """
        return {"file": self._find, "keep": self._keep}

    def complete(self, prepared: Prepared) -> Prepared:
        """Return `prepared` with its items' features, and release these here."""
        if not self._items:
            return prepared
        prompts, anew = map(self._complete, (prepared.prompts, prepared.anew))
        self._items.clear()
        return replace(prepared, prompts=prompts, anew=anew)

    def _find(self, key: FileKey) -> Parts | None:
        parts = self._processors[key[0]].files.get(key)
        return None if parts is None else self._without_features(parts)

    def _keep(self, key: FileKey, parts: Parts) -> Parts:
        return self._without_features(self._processors[key[0]].files.put(key, parts))

    def _without_features(self, parts: Parts) -> Parts:
        self._items |= {part.item.digest: part.item for part in parts}
        return tuple(replace(part, item=replace(part.item, features=b"")) for part in parts)

    def _complete(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        return tuple(
            replace(prompt, media=tuple(map(self._featured, prompt.media))) for prompt in prompts
        )

    def _featured(self, placed: PlacedMedia) -> PlacedMedia:
        item = placed.item
        return placed if item.features else replace(placed, item=self._items[item.digest])
