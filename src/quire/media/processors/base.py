"""What image processors share: the tokens around a picture, and a cache of those read lately.

The cache is there because a conversation's pictures come again with each of its turns.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import PIL.Image

from quire.core.errors import ModelError
from quire.core.kept import Kept
from quire.core.request import Image
from quire.media.images import MAX_PIXELS, decode
from quire.media.source import Detail

CACHE_BYTES = 64 << 20

ImageKey = tuple[bytes, Detail]
"""A file's digest, and how fine it was read."""


class ImageStore(Protocol):
    """Where images that were read are found again."""

    def get(self, key: ImageKey) -> Image | None: ...

    def put(self, key: ImageKey, value: Image) -> Image:
        """The image to go on with: this one, or an equal one."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """A JSON object of a model folder, read with errors that name file and key.

    Attributes:
        prefix: the way to the object within the file, e.g. "image_processor.".
    """

    path: Path
    prefix: str
    values: dict[str, Any]

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; without a default the key has to be there.

        Raises:
            ModelError: it is something else.
        """
        value = self.values.get(key, default)
        if type(value) is not int or value < least:
            raise self.error(key, f"not a whole number from {least} up")
        return value

    def error(self, key: str, expected: str) -> ModelError:
        """For a value that is not what was `expected`."""
        value = repr(self.values[key]) if key in self.values else "missing"
        return ModelError(f"{self.path}: '{self.prefix}{key}' is {value}, {expected}")


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens of a picture in a prompt.

    Attributes:
        mark: what chat templates write once for each picture; as many as it has soft tokens
            take its place.
        before, after: go around those.
    """

    mark: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class ImageProcessor(ABC):
    """From a picture's bytes to the patches that a vision encoder takes. Any thread may call it.

    Attributes:
        images: those read lately.
    """

    def __init__(self, marks: Marks, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.mark = marks.mark
        self.before = marks.before
        self.after = marks.after
        self.images: ImageStore = Kept[ImageKey, Image](
            cache_bytes, lambda image: len(image.pixels)
        )

    def read(
        self,
        data: bytes,
        *,
        param: str,
        detail: Detail = "auto",
        max_pixels: int = MAX_PIXELS,
    ) -> Image:
        """Decodes, resizes and cuts a picture; one that was read lately is not read again.

        Args:
            data: the file's bytes.
            param: the request field that holds it, for errors.
            max_pixels: width times height, before it is scaled.

        Raises:
            RequestError: it is too large, or is no picture that can be used.
        """
        key = (hashlib.blake2b(data, digest_size=32).digest(), detail)
        image = self.images.get(key)
        if image is None:
            picture = decode(data, param=param, max_pixels=max_pixels)
            image = self.images.put(key, self.cut(picture, param, detail))
        return image

    @abstractmethod
    def cut(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Image:
        """Resizes a picture in RGB and cuts it into patches.

        Raises:
            RequestError: it cannot be brought to a size that the model takes.
        """


def image_of(pixels: bytes, rows: int, columns: int, tokens: int) -> Image:
    """An `Image` with its digest."""
    digest = hashlib.blake2b(pixels, digest_size=24)
    digest.update(rows.to_bytes(4, "little") + columns.to_bytes(4, "little"))
    return Image(pixels, rows, columns, tokens, digest.digest())
