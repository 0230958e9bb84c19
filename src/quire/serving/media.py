"""Media on the HTTP side: from what messages name to places in a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary, finalize

from quire.core.errors import Overloaded, RequestError
from quire.core.media import MediaItem, PlacedMedia
from quire.media.fetch import FetchPolicy, fetch
from quire.media.processors import MediaProcessor
from quire.media.processors.base import ItemKey, ItemStore
from quire.media.source import MediaSource, not_taken

Message = Mapping[str, Any]

_FETCHED_AT_ONCE = 4
_HELD_BYTES = 1 << 30
"""Features of all requests in flight, which the engine keeps until they end."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and the media whose placeholders are among them."""

    tokens: tuple[int, ...]
    media: tuple[PlacedMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What one request may bring.

    Attributes:
        items: earlier messages' included.
        pixels: of one image, width times height, before it is scaled.
    """

    items: int
    pixels: int


class MediaLoader:
    """Reads the media of messages and places it in prompts.

    Args:
        processors: the model's, by kind; empty in a model that takes text only.
    """

    def __init__(
        self,
        processors: Mapping[str, MediaProcessor],
        policy: FetchPolicy,
        limits: MediaLimits,
    ) -> None:
        self._processors = processors
        self._policy = policy
        self._limits = limits
        self._fetching = asyncio.Semaphore(_FETCHED_AT_ONCE)
        self._decoding = asyncio.Semaphore(1)  # bounds what decoded items hold
        self._held = 0
        self._lent: WeakValueDictionary[bytes, MediaItem] = WeakValueDictionary()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that messages may hold."""
        return tuple(self._processors)

    async def load(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with every `{"source": MediaSource}` read: `{"item": MediaItem}`.

        Raises:
            RequestError: the model does not take the kind, there are too many, or one cannot be
                used.
        """
        sources: list[MediaSource] = [
            part["source"] for part in _media_parts(messages) if "source" in part
        ]
        if not sources:
            return messages
        for source in sources:
            if source.kind not in self._processors:
                raise not_taken(source.named, source.param)
        limit = self._limits.items
        if len(sources) > limit:
            raise RequestError(
                f"The request holds {len(sources)} images; at most {limit} are taken.",
                param=sources[limit].param,
                code="too_many_images",
            )
        reading = [asyncio.create_task(self._read(each)) for each in sources]
        try:
            items = await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
        following = iter(items)
        return tuple(_with_items(message, following) for message in messages)

    @staticmethod
    def wanted(messages: Sequence[Message]) -> bool:
        """Whether messages name media that has to be loaded."""
        return any("source" in part for part in _media_parts(messages))

    def share(self, items: ItemStore) -> None:
        """Finds and keeps items in another place from now on."""
        for processor in self._processors.values():
            processor.items = items

    def answers(self, lent: list[MediaItem]) -> dict[str, Callable[..., object]]:
        """What a job is answered whose processors keep their items here, see `api.reading`.

        Args:
            lent: holds the items that the job refers to by their digests.
        """

        def lend(item: MediaItem) -> MediaItem:
            lent.append(item)
            self._lent[item.digest] = item
            return replace(item, features=b"")

        def known(key: ItemKey) -> MediaItem | None:
            item = self._processors[key[0]].items.get(key)
            return None if item is None else lend(item)

        def keep(key: ItemKey, item: MediaItem) -> MediaItem:
            return lend(self._processors[key[0]].items.put(key, item))

        return {"item": known, "keep": keep}

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
                f"Requests in flight hold images of {self._held} bytes, of {_HELD_BYTES}.",
                param="messages",
                code="too_many_images_in_flight",
            )

    def hold(self, run: object, prompts: Sequence[Prompt]) -> None:
        """Counts the media of prompts as held for as long as `run` is there."""
        size = _bytes_of(prompts)
        if size:
            self._held += size
            finalize(run, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self._held -= size

    async def _read(self, source: MediaSource) -> MediaItem:
        async with self._fetching if source.remote else nullcontext():
            fetched = await fetch(source.url, self._policy, param=source.param)
        async with self._decoding:
            return await asyncio.to_thread(
                self._processors[source.kind].read,
                fetched.data,
                param=source.param,
                detail=source.detail,
                max_pixels=self._limits.pixels,
            )

    def place(self, ids: Sequence[int], items: Sequence[MediaItem]) -> Prompt:
        """The prompt with each item's placeholders where the template's token for its kind stood.

        Raises:
            RequestError: the template has left an item out.
        """
        kinds = {each.placeholders.token: kind for kind, each in self._processors.items()}
        places = [(at, kinds[token]) for at, token in enumerate(ids) if token in kinds]
        if [kind for _, kind in places] != [item.kind for item in items]:
            raise RequestError(
                f"The model's chat template has a place for {len(places)} of {len(items)} images.",
                param="messages",
                code="unsupported_content",
            )
        tokens: list[int] = []
        placed: list[PlacedMedia] = []
        done = 0
        for (at, kind), item in zip(places, items, strict=True):
            placeholders = self._processors[kind].placeholders
            tokens += ids[done:at]
            tokens += placeholders.before
            placed.append(PlacedMedia(len(tokens), item))
            tokens += [placeholders.token] * item.tokens
            tokens += placeholders.after
            done = at + 1
        tokens += ids[done:]
        return Prompt(tuple(tokens), tuple(placed))


def _bytes_of(prompts: Sequence[Prompt]) -> int:
    return sum(len(each.item.features) for prompt in prompts for each in prompt.media)


def items_of(messages: Sequence[Message]) -> list[MediaItem]:
    """The media of messages that has been loaded, in order."""
    return [part["item"] for part in _media_parts(messages)]


def as_template_reads(message: Message) -> Message:
    """A message whose content is one string, a line for each text; with media, a list of parts.

    Not every template reads lists; one that has a place for media does.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if all(part["type"] == "text" for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] != "text":
            parts.append({"type": part["type"]})
        elif parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}\n{part['text']}"}
        else:
            parts.append({"type": "text", "text": part["text"]})
    return {**message, "content": parts}


def text_length(message: Message) -> int:
    """Characters of a message's content."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


def _media_parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] != "text"]


def _with_items(message: Message, items: Iterator[MediaItem]) -> Message:
    """The message, its sources replaced by the next of `items`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": p["type"], "item": next(items)} if "source" in p else p for p in content]
    return {**message, "content": parts}
