"""Common parts of processors: placeholder tokens and a cache of recent items.

Items are cached because each turn of a conversation sends its media again.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import PIL.Image

from quire.core.lru import LruCache
from quire.core.media import RAW_COLOURS, Colours, MediaItem
from quire.core.values import Values
from quire.media import images, sound, video
from quire.media.parts import FileKey, MediaPart, Parts, PartStore
from quire.media.source import DEFAULT_LIMITS, Detail, FileLimits, refusal

CACHE_BYTES = 64 << 20
_BLANK = (640, 480)
"""Width and height of an example's pictures, in pixels."""
_BLANK_FRAMES = 8
"""Frames of an example's video, which is one second long."""

BILINEAR, BICUBIC = 2, 3
"""Filters of `resample`."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The tokens that stand for an item in a prompt.

    Attributes:
        token: the token that chat templates write once for each file. It is repeated for each row
            of the item.
        before, after: tokens before and after the repeated ones.
        mark: the text of a rendered template that is replaced by the item and its text; None means
            the text of `token`.
        numbered: text before each file of a prompt, in which `{}` stands for its number among the
            files of its kind, from 0.
    """

    token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    mark: str | None = None
    numbered: str = ""


class MediaProcessor(ABC):
    """Turns a file's bytes into one kind of encoder's input. Thread-safe.

    Attributes:
        kind: the media kind.
        files: cache of recently read files.
        detail_of_several: default detail if a request holds several files of this kind.
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
        """Decode and prepare a file, or return it from the cache of recent files.

        Args:
            data: the file's bytes.
            param: the request field that holds it, for errors.
            sound: whether to read the sound of a video too.

        Raises:
            RequestError: the file is too large, or cannot be used.
        """
        key = (self.kind, hashlib.blake2b(data, digest_size=32).digest(), detail, sound)
        parts = self.files.get(key)
        if parts is None:
            prepare = self.prepare_with_sound if sound else self.prepare
            parts = self.files.put(key, prepare(data, param, detail, limits=limits))
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

    def example(self) -> Parts | None:
        """Return the encoder's input for a blank file, or None if the kind has no such file."""
        return None

    def tokens(self, item: MediaItem) -> list[int]:
        """Return the placeholder tokens of an item."""
        return [self.placeholders.token] * item.tokens


def check_pixels(settings: Values, colours: Colours, resample: int = BICUBIC) -> None:
    """Refuse settings that describe pixels other than the ones that the model computes from bytes.

    The model takes bytes and scales them to `colours`. A null counts as a value here: in
    transformers it turns a step off.

    Args:
        resample: the number of the filter that resizes pictures.

    Raises:
        ModelError: a setting differs; the message names it.
    """
    values = settings.values
    for key in ("do_resize", "do_rescale", "do_convert_rgb"):
        # Gemma 3's settings hold null for do_convert_rgb: pictures are in RGB already.
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
    """Return whether a setting, one number or three, equals these values of red, green and blue."""
    numbers = value if isinstance(value, list | tuple) else [value] * 3
    if len(numbers) != 3 or not all(isinstance(each, int | float) for each in numbers):
        return False
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(numbers, wanted, strict=True))


class ImageProcessor(MediaProcessor):
    """Cuts pictures into patches."""

    kind = "image"

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        return self.preprocess(images.decode(data, param=param, limits=limits), param, detail)

    def example(self) -> Parts:
        return self.preprocess(PIL.Image.new("RGB", _BLANK), "", "auto")

    @abstractmethod
    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        """Resize a picture in RGB and cut it into patches.

        Raises:
            RequestError: the picture cannot be resized to a size that the model takes.
        """


OpenImages = Callable[[Values, Values], ImageProcessor]
"""Opens an image processor from the processor's settings and the model's configuration."""


def open_by_model(openers: Mapping[str, OpenImages]) -> OpenImages:
    """Return a function that opens the processor of the model's `model_type`.

    It is for settings that name the same processor for models whose pictures are prepared in
    different ways. It raises `ModelError` if the `model_type` is unknown.
    """

    def open(settings: Values, config: Values) -> ImageProcessor:
        opener = openers.get(str(config.value("model_type")))
        if opener is None:
            raise config.error("model_type", f"whose pictures are not known (known: {[*openers]})")
        return opener(settings, config)

    return open


class WholeImageProcessor(ImageProcessor):
    """An image processor that makes one item of each picture, without surrounding text."""

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        return (MediaPart(self.item(picture, param, detail)),)

    @abstractmethod
    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        """Return the picture as one item. The arguments are those of `preprocess`."""


class AudioProcessor(MediaProcessor):
    """Computes features of sound.

    Attributes:
        rate: sample rate that the features are computed from, in samples a second.
        seconds: the longest sound that the model takes, in seconds.
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

    def example(self) -> Parts:
        second = np.zeros(self.rate, np.float32)
        return (MediaPart(self.item(second, "")),)

    @abstractmethod
    def item(self, samples: sound.Samples, param: str) -> MediaItem:
        """Compute the features of sound, `[samples]` of one channel at `rate`.

        Raises:
            RequestError: the sound is too short.
        """


class VideoProcessor(MediaProcessor):
    """Computes features of a video's frames."""

    kind = "video"

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        with video.opened(data, param=param, limits=limits) as opened:
            wanted = self.sample_frames(opened.info, limits.frames)
            return self.preprocess(
                opened.info, opened.frames(wanted), len(wanted), param=param, detail=detail
            )

    def example(self) -> Parts:
        info = video.VideoInfo(_BLANK_FRAMES, _BLANK_FRAMES)
        wanted = self.sample_frames(info, _BLANK_FRAMES)
        frames = (video.Frame(index, PIL.Image.new("RGB", _BLANK)) for index in wanted)
        return self.preprocess(info, frames, len(wanted), param="", detail="auto")

    @abstractmethod
    def sample_frames(self, info: video.VideoInfo, maximum: int) -> Sequence[int]:
        """Choose the frames to read. Return their indices, ascending; at least one, at most
        `maximum`.
        """

    @abstractmethod
    def preprocess(
        self,
        info: video.VideoInfo,
        frames: Iterator[video.Frame],
        count: int,
        param: str,
        detail: Detail,
    ) -> Parts:
        """Compute the features of the chosen frames, which are decoded on demand.

        Args:
            count: number of frames.

        Raises:
            RequestError: the frames cannot be resized to a size that the model takes.
        """
