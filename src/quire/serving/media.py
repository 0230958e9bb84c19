"""Media on the HTTP side: fetching and reading what messages refer to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.core.errors import RequestError
from quire.media.documents import pages
from quire.media.fetch import FetchPolicy, fetch
from quire.media.kinds import inputs
from quire.media.parts import Parts, PartStore
from quire.media.source import DOCUMENT, Detail, FileLimits, MediaLimits, MediaSource, not_taken
from quire.serving.job_media import JobMedia
from quire.serving.messages import Part, ReadPart, SourcePart, TemplateMessage, text_part
from quire.serving.placing import MediaPlaces
from quire.serving.tasks import cancel_and_wait

if TYPE_CHECKING:
    from quire.media.processors.base import MediaProcessor

_FETCHED_AT_ONCE = 4


class MediaLoader:
    """Reads the media of messages.

    Attributes:
        places: puts media into prompts.

    Args:
        processors: the model's media processors, by kind; empty for a text model.
        tokens: see `MediaPlaces`.
        limits: limits by kind, at least for each kind with a processor.
    """

    def __init__(
        self,
        processors: Mapping[str, MediaProcessor],
        tokens: Mapping[str, str],
        policy: FetchPolicy,
        limits: Mapping[str, MediaLimits],
    ) -> None:
        self.places = MediaPlaces(processors, tokens)
        self._processors = processors
        self._policy = policy
        self._limits = limits
        self._fetching = asyncio.Semaphore(_FETCHED_AT_ONCE)
        self._decoding = asyncio.Semaphore(1)  # bounds what decoded items hold

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that messages may hold."""
        return tuple(self._processors)

    def most(self, kind: str) -> int:
        """Return the most files of a kind in one request."""
        return self._limits[kind].files

    async def load(self, messages: tuple[TemplateMessage, ...]) -> tuple[TemplateMessage, ...]:
        """Return the messages with every `{"source": MediaSource}` replaced by `{"parts": Parts}`.

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
                raise not_taken(source)
        self._check_count(sources)
        sources = self._together(sources)
        reading = [asyncio.create_task(self._read(each)) for each in sources]
        try:
            files = await asyncio.gather(*reading)
        finally:
            await cancel_and_wait(*reading)
        following = iter(files)
        return tuple(_with_parts(message, following) for message in messages)

    def _takes(self, source: MediaSource) -> bool:
        """Return whether the model takes the kind, or it is a document that can be rendered."""
        return bool(source.url) if source.kind == DOCUMENT else source.kind in self._processors

    def _together(self, sources: Sequence[MediaSource]) -> list[MediaSource]:
        """Set the resolution of sources without one, by how many of a kind there are."""
        counts = Counter(each.kind for each in sources)

        def detail(source: MediaSource) -> Detail:
            processor = self._processors.get(source.kind)
            if processor is None or counts[source.kind] == 1 or source.detail != "auto":
                return source.detail
            return processor.detail_of_several

        return [replace(each, detail=detail(each)) for each in sources]

    def _check_count(self, sources: Sequence[MediaSource]) -> None:
        for kind in self._limits:
            found = [source for source in sources if source.kind == kind]
            limit = self._limits[kind].files
            if len(found) > limit:
                plural = inputs()[kind].plural
                raise RequestError(
                    f"The request holds {len(found)} {plural}; at most {limit} are allowed "
                    f"(--max-{inputs()[kind].name}s).",
                    param=found[limit].param,
                    code=f"too_many_{kind}s",
                )

    @staticmethod
    def wanted(messages: Sequence[TemplateMessage]) -> bool:
        """Return whether messages refer to media that has to be loaded."""
        return any("source" in part for part in _media_parts(messages))

    def for_job(self) -> JobMedia:
        """Return the server's side of a request's media that is read in a job."""
        return JobMedia(self._processors)

    def share(self, files: PartStore) -> None:
        """Use another store of read files from now on."""
        for processor in self._processors.values():
            processor.files = files

    async def _read(self, source: MediaSource) -> list[Part]:
        """Return the parts of a message that replace a source."""
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
        return [ReadPart(type=source.kind, parts=parts)]

    def _pages(self, data: bytes, source: MediaSource, limits: FileLimits) -> list[Part]:
        """Return each page of a document as text, and as an image if the model sees images."""
        images = self._processors.get("image")
        parts: list[Part] = []
        found = pages(data, param=source.param, limits=limits, pictures=images is not None)
        for number, page in enumerate(found, 1):
            parts.append(text_part(f"[Page {number}]\n{page.text}"))
            if images is not None:
                shown = images.read(page.picture, param=source.param, detail=source.detail)
                parts.append(ReadPart(type="image", parts=shown))
        return parts


def files_of(messages: Sequence[TemplateMessage]) -> list[Parts]:
    """Return the parts that were read from the messages' files, in order."""
    return [part["parts"] for part in _media_parts(messages) if "parts" in part]


def as_template_reads(message: Mapping[str, object]) -> Mapping[str, object]:
    """Return a message with the content that its template reads."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": template_content(content)}


def template_content(content: str | list[Part]) -> str | list[dict[str, str]]:
    """Return the texts of a message, joined to one string; with media, a list of parts."""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if "text" in part]
    if len(texts) == len(content):
        return "\n".join(texts)
    parts: list[dict[str, str]] = []
    for part in content:
        if "text" not in part:
            parts.append({"type": part["type"]})
        elif parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}\n{part['text']}"}
        else:
            parts.append({"type": "text", "text": part["text"]})
    return parts


def text_length(message: TemplateMessage) -> int:
    """Return the characters of a message's content."""
    content = message["content"]
    if isinstance(content, str):
        return len(content)
    return sum(len(part["text"]) for part in content if "text" in part)


def _media_parts(messages: Sequence[TemplateMessage]) -> list[SourcePart | ReadPart]:
    found: list[SourcePart | ReadPart] = []
    for message in messages:
        if not isinstance(content := message["content"], str):
            found += [part for part in content if "text" not in part]
    return found


def _with_parts(message: TemplateMessage, files: Iterator[list[Part]]) -> TemplateMessage:
    """Return the message with its sources replaced by the parts from the next of `files`."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [part for p in content for part in (next(files) if "source" in p else (p,))]
    return {**message, "content": parts}
