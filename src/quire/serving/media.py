"""Media on the HTTP side: from what messages name to places in a prompt."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary, finalize

from quire.core.errors import Overloaded, RequestError
from quire.core.media import MediaItem, PlacedMedia
from quire.media.documents import pages
from quire.media.fetch import FetchPolicy, fetch
from quire.media.kinds import inputs
from quire.media.processors import MediaProcessor
from quire.media.processors.base import FileKey, MediaPart, Parts, PartStore
from quire.media.source import DOCUMENT, Detail, FileLimits, MediaLimits, MediaSource, not_taken

Message = Mapping[str, Any]

_FETCHED_AT_ONCE = 4
_HELD_BYTES = 1 << 30
"""Features of all requests in flight, which the engine keeps until they end."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and the media whose placeholders are among them."""

    tokens: tuple[int, ...]
    media: tuple[PlacedMedia, ...] = ()


class MediaLoader:
    """Reads the media of messages and places it in prompts.

    Args:
        processors: the model's, by kind; empty in a model that takes text only.
        tokens: the text of each processor's token, by kind.
        limits: by kind, of those that have a processor at least.
    """

    def __init__(
        self,
        processors: Mapping[str, MediaProcessor],
        tokens: Mapping[str, str],
        policy: FetchPolicy,
        limits: Mapping[str, MediaLimits],
    ) -> None:
        self._processors = processors
        self._tokens = tokens
        self._marks = {
            each.placeholders.mark or tokens[kind]: kind for kind, each in processors.items()
        }
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

    @property
    def marks(self) -> frozenset[str]:
        """The texts of a rendered template that media takes the place of."""
        return frozenset(self._marks)

    @property
    def marks_by_kind(self) -> dict[str, str]:
        """The text that media of a kind takes the place of."""
        return {kind: mark for mark, kind in self._marks.items()}

    async def load(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with every `{"source": MediaSource}` read: `{"parts": Parts}`.

        A document becomes a text for each page, and an image behind it where the model sees.

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
            if not self._takes(source):
                raise not_taken(source.named, source.param)
        self._check_count(sources)
        sources = self._together(sources)
        reading = [asyncio.create_task(self._read(each)) for each in sources]
        try:
            files = await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
        following = iter(files)
        return tuple(_with_parts(message, following) for message in messages)

    def _takes(self, source: MediaSource) -> bool:
        """Whether the kind is the model's, or a document that can be looked at."""
        return bool(source.url) if source.kind == DOCUMENT else source.kind in self._processors

    def _together(self, sources: Sequence[MediaSource]) -> list[MediaSource]:
        """Sources as finely read as the model reads several of a kind, where they do not say."""
        counts = Counter(each.kind for each in sources)

        def detail(source: MediaSource) -> Detail:
            processor = self._processors.get(source.kind)
            if processor is None or counts[source.kind] == 1 or source.detail != "auto":
                return source.detail
            return processor.in_company

        return [replace(each, detail=detail(each)) for each in sources]

    def _check_count(self, sources: Sequence[MediaSource]) -> None:
        for kind in self._limits:
            found = [source for source in sources if source.kind == kind]
            limit = self._limits[kind].files
            if len(found) > limit:
                plural = inputs()[kind].plural
                raise RequestError(
                    f"The request holds {len(found)} {plural}; at most {limit} are taken.",
                    param=found[limit].param,
                    code=f"too_many_{kind}s",
                )

    @staticmethod
    def wanted(messages: Sequence[Message]) -> bool:
        """Whether messages name media that has to be loaded."""
        return any("source" in part for part in _media_parts(messages))

    def share(self, files: PartStore) -> None:
        """Finds and keeps what was read in another place from now on."""
        for processor in self._processors.values():
            processor.files = files

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

    async def _read(self, source: MediaSource) -> list[dict[str, Any]]:
        """The parts of a message that take a source's place."""
        limits = self._limits[source.kind].each
        policy = replace(self._policy, max_bytes=limits.bytes)
        async with self._fetching if source.remote else nullcontext():
            data = await fetch(source.url, policy, param=source.param)
        async with self._decoding:
            if source.kind == DOCUMENT:
                return await asyncio.to_thread(self._pages, data, source, limits)
            parts = await asyncio.to_thread(
                self._processors[source.kind].read,
                data,
                param=source.param,
                detail=source.detail,
                sound=source.sound,
                limits=limits,
            )
        return [{"type": source.kind, "parts": parts}]

    def _pages(self, data: bytes, source: MediaSource, limits: FileLimits) -> list[dict[str, Any]]:
        """Each page of a document as a text, and as an image where the model sees."""
        eyes = self._processors.get("image")
        parts: list[dict[str, Any]] = []
        found = pages(data, param=source.param, limits=limits, pictures=eyes is not None)
        for number, page in enumerate(found, 1):
            parts.append({"type": "text", "text": f"[Page {number}]\n{page.text}"})
            if eyes is not None:
                shown = eyes.read(page.picture, param=source.param, detail=source.detail)
                parts.append({"type": "image", "parts": shown})
        return parts

    def spell(self, rendered: str, files: Sequence[Parts]) -> str:
        """A rendered template with the words of files' parts, and a token for each, at its marks.

        Text from outside holds no marks: it is covered, see `Controls`.
        """
        tokens = {kind for mark, kind in self._marks.items() if mark == self._tokens[kind]}
        if all(_bare(parts) and parts[0].item.kind in tokens for parts in files):
            return rendered
        following = iter(files)

        def words(found: re.Match[str]) -> str:
            token, parts = self._tokens[self._marks[found[0]]], next(following, None)
            if parts is None:
                return found[0]  # `place` refuses it
            return "".join(f"{part.before}{token}{part.after}" for part in parts)

        return re.sub("|".join(map(re.escape, self._marks)), words, rendered)

    def place(self, ids: Sequence[int], items: Sequence[MediaItem]) -> Prompt:
        """The prompt with each item's placeholders where the template's token for its kind stood.

        Raises:
            RequestError: the template has left an item out.
        """
        own = {kind: each.placeholders for kind, each in self._processors.items()}
        # Of several kinds it may be the same, such as of pictures and of a video's frames.
        known = {each.token for each in own.values()}
        places = [(at, token) for at, token in enumerate(ids) if token in known]
        if [token for _, token in places] != [own[item.kind].token for item in items]:
            raise RequestError(
                f"The model's chat template has a place for {len(places)} of {len(items)} media "
                "items.",
                param="messages",
                code="unsupported_content",
            )
        tokens: list[int] = []
        placed: list[PlacedMedia] = []
        done = 0
        for (at, _), item in zip(places, items, strict=True):
            placeholders = own[item.kind]
            tokens += ids[done:at]
            tokens += placeholders.before
            placed.append(PlacedMedia(len(tokens), item))
            tokens += self._processors[item.kind].tokens(item)
            tokens += placeholders.after
            done = at + 1
        tokens += ids[done:]
        return Prompt(tuple(tokens), tuple(placed))


def _bytes_of(prompts: Sequence[Prompt]) -> int:
    return sum(len(each.item.features) for prompt in prompts for each in prompt.media)


def _bare(parts: Parts) -> bool:
    """Whether a file is one item without words."""
    return len(parts) == 1 and not parts[0].before and not parts[0].after


def files_of(messages: Sequence[Message]) -> list[Parts]:
    """What was read of the messages' files, in order."""
    return [part["parts"] for part in _media_parts(messages)]


def as_template_reads(message: Message) -> Message:
    """A message whose content is one string, a line for each text; with media, a list of parts."""
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


def _with_parts(message: Message, files: Iterator[list[dict[str, Any]]]) -> Message:
    """The message, its sources replaced by the parts that the next of `files` became."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [part for p in content for part in (next(files) if "source" in p else (p,))]
    return {**message, "content": parts}
