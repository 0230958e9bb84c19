"""Media that the server keeps, for jobs that read prompts and for requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary, finalize

from quire.core.errors import Overloaded
from quire.core.media import MediaItem, PlacedMedia
from quire.media.processors import MediaProcessor
from quire.media.processors.base import FileKey, MediaPart, Parts
from quire.serving.placing import Prompt

_HELD_BYTES = 1 << 30
"""Features of all requests in flight, which the engine keeps until they end."""


class HeldMedia:
    """Features of media, by their digests, and how much of them requests hold.

    Args:
        processors: the model's, by kind; they keep the files that were read lately.
    """

    def __init__(self, processors: Mapping[str, MediaProcessor]) -> None:
        self._processors = processors
        self._held = 0
        self._lent: WeakValueDictionary[bytes, MediaItem] = WeakValueDictionary()

    def answers(self, lent: list[MediaItem]) -> dict[str, Callable[..., object]]:
        """What a job is answered whose processors keep what they read here, see `api.reading`.

        Args:
            lent: holds the items that the job refers to by their digests.
        """

        def lend(part: MediaPart) -> MediaPart:
            item = part.item
            lent.append(item)
            self._lent[item.digest] = item
            return replace(part, item=replace(item, features=b""))

        def known(key: FileKey) -> Parts | None:
            parts = self._processors[key[0]].files.get(key)
            return None if parts is None else tuple(map(lend, parts))

        def keep(key: FileKey, parts: Parts) -> Parts:
            return tuple(map(lend, self._processors[key[0]].files.put(key, parts)))

        return {"file": known, "keep": keep}

    def complete(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of a job, with the features that it left here."""
        return [
            replace(prompt, media=tuple(map(self._complete, prompt.media))) for prompt in prompts
        ]

    def _complete(self, placed: PlacedMedia) -> PlacedMedia:
        item = placed.item
        return placed if item.features else replace(placed, item=self._lent[item.digest])

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """Raises `Overloaded` if other requests' media fills the memory that there is for them."""
        if self._held and self._held + _bytes_of(prompts) > _HELD_BYTES:
            raise Overloaded(
                f"Requests in flight hold media of {self._held} bytes, of {_HELD_BYTES}.",
                param="messages",
                code="too_much_media_in_flight",
            )

    def hold(self, run: object, prompts: Sequence[Prompt]) -> None:
        """Counts the media of prompts as held for as long as `run` is there."""
        size = _bytes_of(prompts)
        if size:
            self._held += size
            finalize(run, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self._held -= size


def _bytes_of(prompts: Sequence[Prompt]) -> int:
    return sum(len(each.item.features) for prompt in prompts for each in prompt.media)
