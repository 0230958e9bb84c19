"""What processors share: the tokens around an item, and a cache of those read lately.

The cache is there because a conversation's media comes again with each of its turns.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import PIL.Image

from quire.core.errors import ModelError
from quire.core.lru import LruCache
from quire.core.media import RAW_COLOURS, Colours, MediaItem
from quire.media.images import MAX_PIXELS, decode
from quire.media.source import Detail

CACHE_BYTES = 64 << 20

_BICUBIC = 3

ItemKey = tuple[str, bytes, Detail]
"""A kind, a file's digest, and how fine it was read."""


class ItemStore(Protocol):
    """Where items that were read are found again."""

    def get(self, key: ItemKey) -> MediaItem | None: ...

    def put(self, key: ItemKey, value: MediaItem) -> MediaItem:
        """The item to go on with: this one, or an equal one."""
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

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
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
class Placeholders:
    """The tokens of an item in a prompt.

    Attributes:
        token: what chat templates write once for each item; as many as it has rows take its place.
        before, after: go around those.
    """

    token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class MediaProcessor(ABC):
    """From a file's bytes to what the encoder of one kind takes. Any thread may call it.

    Attributes:
        kind: of media.
        items: those read lately.
    """

    kind: ClassVar[str]

    def __init__(self, placeholders: Placeholders, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.placeholders = placeholders
        self.items: ItemStore = LruCache[ItemKey, MediaItem](
            cache_bytes, lambda item: len(item.features)
        )

    def read(
        self,
        data: bytes,
        *,
        param: str,
        detail: Detail = "auto",
        max_pixels: int = MAX_PIXELS,
    ) -> MediaItem:
        """Decodes a file and prepares it; one that was read lately is not read again.

        Args:
            data: the file's bytes.
            param: the request field that holds it, for errors.
            max_pixels: width times height, before it is scaled.

        Raises:
            RequestError: it is too large, or nothing that can be used.
        """
        key = (self.kind, hashlib.blake2b(data, digest_size=32).digest(), detail)
        item = self.items.get(key)
        if item is None:
            item = self.items.put(key, self.prepare(data, param, detail, max_pixels))
        return item

    @abstractmethod
    def prepare(self, data: bytes, param: str, detail: Detail, max_pixels: int) -> MediaItem:
        """What the encoder takes of a file.

        Raises:
            RequestError: see `read`.
        """


def check_pixels(settings: Settings, colours: Colours) -> None:
    """Refuses settings under which a pixel would be something other than the model computes of it.

    The model takes bytes, and scales them to `colours`.

    Raises:
        ModelError: naming the setting.
    """
    values = settings.values
    for key in ("do_resize", "do_rescale", "do_convert_rgb"):
        if values.get(key, True) is not True:
            raise settings.error(key, "and only true is supported")
    if values.get("resample", _BICUBIC) != _BICUBIC:
        raise settings.error("resample", f"and only {_BICUBIC} (bicubic) is supported")
    factor = values.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255):
        raise settings.error("rescale_factor", "and only 1/255 is supported")
    raw = colours == RAW_COLOURS
    if not values.get("do_normalize", not raw):
        if not raw:
            raise settings.error("do_normalize", "and only true is supported")
        return
    for key, wanted in (("image_mean", colours.mean), ("image_std", colours.std)):
        if not _is_colour(values.get(key, wanted), wanted):
            raise settings.error(key, f"and only {list(wanted)} is supported")


def _is_colour(value: Any, wanted: tuple[float, float, float]) -> bool:
    """Whether a setting says this of red, green and blue: with one number, or with three."""
    numbers = value if isinstance(value, list | tuple) else [value] * 3
    if len(numbers) != 3 or not all(isinstance(each, int | float) for each in numbers):
        return False
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(numbers, wanted, strict=True))


class ImageProcessor(MediaProcessor):
    """Cuts pictures into patches."""

    kind = "image"

    def prepare(self, data: bytes, param: str, detail: Detail, max_pixels: int) -> MediaItem:
        return self.cut(decode(data, param=param, max_pixels=max_pixels), param, detail)

    @abstractmethod
    def cut(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        """Resizes a picture in RGB and cuts it into patches.

        Raises:
            RequestError: it cannot be brought to a size that the model takes.
        """
