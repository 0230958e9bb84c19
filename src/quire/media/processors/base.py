"""Common parts of processors: placeholder tokens and a cache of recent items.

The cache is there because a conversation's media comes again with each of its turns.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import PIL.Image

from quire.core.lru import LruCache
from quire.core.media import RAW_COLOURS, Colours, MediaItem
from quire.core.values import Values
from quire.media import images, sound, video
from quire.media.source import DEFAULT_LIMITS, Detail, FileLimits, refusal

CACHE_BYTES = 64 << 20

BILINEAR, BICUBIC = 2, 3
"""Filters of `resample`."""

FileKey = tuple[str, bytes, Detail, bool]
"""A kind, a file's digest, how fine it was read, and whether with the sound of a video."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One of the items that a file becomes: a video may become an item a frame, with its time.

    Attributes:
        before, after: text of the template's own around the item's placeholders. It may hold
            control tokens.
    """

    item: MediaItem
    before: str = ""
    after: str = ""


Parts = tuple[MediaPart, ...]
"""The parts of a file, in order; at least one."""


class PartStore(Protocol):
    """A cache of files that were read."""

    def get(self, key: FileKey) -> Parts | None: ...

    def put(self, key: FileKey, value: Parts) -> Parts:
        """Return the parts to go on with: these, or equal ones."""
        ...


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The tokens of an item in a prompt.

    Attributes:
        token: what chat templates write once for each file; as many as an item has rows take its
            place.
        before, after: go around those.
        mark: what the text of `MediaPart` and its token take the place of in a rendered template;
            None is the text of `token`.
    """

    token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    mark: str | None = None


class MediaProcessor(ABC):
    """Turns a file's bytes into one kind of encoder's input. Thread-safe.

    Attributes:
        kind: of media.
        files: those read lately.
        detail_of_several: how finely a file is read where a request holds several of the kind and
            does not say.
    """

    kind: ClassVar[str]
    detail_of_several: ClassVar[Detail] = "auto"

    def __init__(self, placeholders: Placeholders, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.placeholders = placeholders
        self.files: PartStore = LruCache[FileKey, Parts](
            cache_bytes, lambda parts: sum(len(part.item.features) for part in parts)
        )

    def read(
        self,
        data: bytes,
        *,
        param: str,
        detail: Detail = "auto",
        sound: bool = False,
        limits: FileLimits = DEFAULT_LIMITS,
    ) -> Parts:
        """Decodes a file and prepares it; one that was read lately is not read again.

        Args:
            data: the file's bytes.
            param: the request field that holds it, for errors.
            sound: with the sound of a video.

        Raises:
            RequestError: it is too large, or nothing that can be used.
        """
        key = (self.kind, hashlib.blake2b(data, digest_size=32).digest(), detail, sound)
        parts = self.files.get(key)
        if parts is None:
            prepare = self.prepare_with_sound if sound else self.prepare
            parts = self.files.put(key, prepare(data, param, detail, limits))
        return parts

    @abstractmethod
    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        """Return the encoder's input for a file.

        Raises:
            RequestError: see `read`.
        """

    def prepare_with_sound(
        self, data: bytes, param: str, detail: Detail, limits: FileLimits
    ) -> Parts:
        """Like `prepare`, for a video with its sound.

        Raises:
            RequestError: see `read`; or the model hears no sound within a video.
        """
        reason = "the model hears no sound within a video, as 'use_audio_in_video' asks"
        raise refusal(param, reason, "unsupported")

    def tokens(self, item: MediaItem) -> list[int]:
        """Return the placeholders that stand for an item in a prompt."""
        return [self.placeholders.token] * item.tokens


def check_pixels(settings: Values, colours: Colours, resample: int = BICUBIC) -> None:
    """Refuses settings under which a pixel would be something other than the model computes of it.

    The model takes bytes, and scales them to `colours`.

    A null is no absent value here: in transformers it turns a step off.

    Args:
        resample: the number of the filter that pictures are resized by.

    Raises:
        ModelError: naming the setting.
    """
    values = settings.values
    for key in ("do_resize", "do_rescale", "do_convert_rgb"):
        # Gemma 3's say null of the last: pictures are in RGB already.
        unsaid = None if key == "do_convert_rgb" else True
        if values.get(key, True) not in (True, unsaid):
            raise settings.error(key, "and only true is supported")
    if values.get("resample", resample) != resample:
        raise settings.error("resample", f"and only {resample} is supported")
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
    """Return whether a setting says this of red, green and blue: with one number, or with three."""
    numbers = value if isinstance(value, list | tuple) else [value] * 3
    if len(numbers) != 3 or not all(isinstance(each, int | float) for each in numbers):
        return False
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(numbers, wanted, strict=True))


class ImageProcessor(MediaProcessor):
    """Cuts pictures into patches."""

    kind = "image"

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        return self.preprocess(images.decode(data, param=param, limits=limits), param, detail)

    @abstractmethod
    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        """Return a picture in RGB, resized and cut into patches.

        Raises:
            RequestError: it cannot be brought to a size that the model takes.
        """


class WholeImageProcessor(ImageProcessor):
    """An image processor that makes one item of a picture, without surrounding text."""

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        return (MediaPart(self.item(picture, param, detail)),)

    @abstractmethod
    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        """Return one item. The arguments are those of `preprocess`."""


class AudioProcessor(MediaProcessor):
    """Makes features of sound.

    Attributes:
        rate: samples a second that the features are made of.
        seconds: the most that the model hears of one file.
    """

    kind = "audio"

    def __init__(
        self,
        placeholders: Placeholders,
        *,
        rate: int,
        seconds: float,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(placeholders, cache_bytes=cache_bytes)
        self.rate = rate
        self.seconds = seconds

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        limits = replace(limits, seconds=min(limits.seconds, self.seconds))
        samples = sound.decode(data, param=param, rate=self.rate, limits=limits)
        return (MediaPart(self.item(samples, param)),)

    @abstractmethod
    def item(self, samples: sound.Samples, param: str) -> MediaItem:
        """Features of sound, `[samples]` of one channel at `rate`.

        Raises:
            RequestError: it is too short.
        """


class VideoProcessor(MediaProcessor):
    """Makes features of frames."""

    kind = "video"

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        with video.opened(data, param=param, limits=limits) as opened:
            wanted = self.sample_frames(opened.info, limits.frames)
            return self.preprocess(opened.info, opened.frames(wanted), len(wanted), param, detail)

    @abstractmethod
    def sample_frames(self, info: video.VideoInfo, maximum: int) -> Sequence[int]:
        """Return the indices of the frames to read, ascending; at least one, at most `maximum`."""

    @abstractmethod
    def preprocess(
        self,
        info: video.VideoInfo,
        frames: Iterator[video.Frame],
        count: int,
        param: str,
        detail: Detail,
    ) -> Parts:
        """Features of the chosen frames, which are decoded as they are asked for.

        Args:
            count: of the frames.

        Raises:
            RequestError: they cannot be brought to a size that the model takes.
        """
