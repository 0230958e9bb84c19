"""Images on the HTTP side: from what messages name to places in a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary, finalize

from quire.core.errors import Overloaded, RequestError
from quire.core.request import Image, PlacedImage
from quire.media.fetch import FetchPolicy, fetch
from quire.media.processors import ImageProcessor
from quire.media.processors.base import ImageKey, ImageStore
from quire.media.source import ImageSource, not_taken

Message = Mapping[str, Any]

_FETCHED_AT_ONCE = 4
_HELD_BYTES = 1 << 30
"""Pixels of all requests in flight, which the engine keeps until they end."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and the images whose soft tokens are among them."""

    tokens: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one request may bring.

    Attributes:
        images: earlier messages' included.
        pixels: of one image, width times height, before it is scaled.
    """

    images: int
    pixels: int


class Pictures:
    """Reads the images of messages and places them in prompts.

    Args:
        processor: the model's; None in a model that takes text only.
    """

    def __init__(
        self,
        processor: ImageProcessor | None,
        policy: FetchPolicy,
        limits: ImageLimits,
    ) -> None:
        self._processor = processor
        self._policy = policy
        self._limits = limits
        self._fetching = asyncio.Semaphore(_FETCHED_AT_ONCE)
        self._decoding = asyncio.Semaphore(1)  # bounds what decoded images hold
        self._held = 0
        self._lent: WeakValueDictionary[bytes, Image] = WeakValueDictionary()

    @property
    def offered(self) -> bool:
        """Whether messages may hold images."""
        return self._processor is not None

    async def load(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with every `{"source": ImageSource}` fetched and read: `{"image": Image}`.

        Raises:
            RequestError: the model takes text only, there are too many, or one cannot be used.
        """
        sources = [part["source"] for part in _image_parts(messages) if "source" in part]
        if not sources:
            return messages
        first: ImageSource = sources[0]
        if self._processor is None:
            raise not_taken(first.kind, first.param)
        limit = self._limits.images
        if len(sources) > limit:
            raise RequestError(
                f"The request holds {len(sources)} images; at most {limit} are taken.",
                param=sources[limit].param,
                code="too_many_images",
            )
        reading = [asyncio.create_task(self._read(self._processor, each)) for each in sources]
        try:
            images = await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
        following = iter(images)
        return tuple(_with_images(message, following) for message in messages)

    @staticmethod
    def wanted(messages: Sequence[Message]) -> bool:
        """Whether messages name images that have to be loaded."""
        return any("source" in part for part in _image_parts(messages))

    def share(self, images: ImageStore) -> None:
        """Finds and keeps images in another place from now on."""
        if self._processor is not None:
            self._processor.images = images

    def answers(self, lent: list[Image]) -> dict[str, Callable[..., object]]:
        """What a job is answered whose processor keeps its images here, see `AskedImages`.

        Args:
            lent: holds the images that the job refers to by their digests.
        """

        def lend(image: Image) -> Image:
            lent.append(image)
            self._lent[image.digest] = image
            return replace(image, pixels=b"")

        def known(key: ImageKey) -> Image | None:
            image = None if self._processor is None else self._processor.images.get(key)
            return None if image is None else lend(image)

        def keep(key: ImageKey, image: Image) -> Image:
            assert self._processor is not None, "images were read"
            return lend(self._processor.images.put(key, image))

        return {"image": known, "keep": keep}

    def whole(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of a job, with the pixels that it left here."""
        return [
            replace(prompt, images=tuple(map(self._whole, prompt.images))) for prompt in prompts
        ]

    def _whole(self, placed: PlacedImage) -> PlacedImage:
        image = placed.image
        return placed if image.pixels else replace(placed, image=self._lent[image.digest])

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """Raises `Overloaded` if other requests' images fill the memory that there is for them."""
        if self._held and self._held + _bytes_of(prompts) > _HELD_BYTES:
            raise Overloaded(
                f"Requests in flight hold images of {self._held} bytes, of {_HELD_BYTES}.",
                param="messages",
                code="too_many_images_in_flight",
            )

    def hold(self, run: object, prompts: Sequence[Prompt]) -> None:
        """Counts the images of prompts as held for as long as `run` is there."""
        size = _bytes_of(prompts)
        if size:
            self._held += size
            finalize(run, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self._held -= size

    async def _read(self, processor: ImageProcessor, source: ImageSource) -> Image:
        async with self._fetching if source.remote else nullcontext():
            fetched = await fetch(source.url, self._policy, param=source.param)
        async with self._decoding:
            return await asyncio.to_thread(
                processor.read,
                fetched.data,
                param=source.param,
                detail=source.detail,
                max_pixels=self._limits.pixels,
            )

    def place(self, ids: Sequence[int], images: Sequence[Image]) -> Prompt:
        """The prompt with each image's soft tokens where the template's mark stood.

        Raises:
            RequestError: the template has left an image out.
        """
        processor = self._processor
        assert processor is not None, "images were read"
        places = [at for at, each in enumerate(ids) if each == processor.mark]
        if len(places) != len(images):
            raise RequestError(
                f"The model's chat template has a place for {len(places)} of {len(images)} images.",
                param="messages",
                code="unsupported_content",
            )
        tokens: list[int] = []
        placed: list[PlacedImage] = []
        done = 0
        for at, image in zip(places, images, strict=True):
            tokens += ids[done:at]
            tokens += processor.before
            placed.append(PlacedImage(len(tokens), image))
            tokens += [processor.mark] * image.tokens
            tokens += processor.after
            done = at + 1
        tokens += ids[done:]
        return Prompt(tuple(tokens), tuple(placed))


def _bytes_of(prompts: Sequence[Prompt]) -> int:
    return sum(len(placed.image.pixels) for prompt in prompts for placed in prompt.images)


def images_of(messages: Sequence[Message]) -> list[Image]:
    """The images of messages that have been loaded, in order."""
    return [part["image"] for part in _image_parts(messages)]


def as_template_reads(message: Message) -> Message:
    """A message whose content is one string, a line for each text; with images, a list of parts.

    Not every template reads lists; one that has a place for images does.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if all(part["type"] == "text" for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "image":
            parts.append({"type": "image"})
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


def _image_parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] == "image"]


def _with_images(message: Message, images: Iterator[Image]) -> Message:
    """The message, its sources replaced by the next of `images`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": "image", "image": next(images)} if "source" in p else p for p in content]
    return {**message, "content": parts}
