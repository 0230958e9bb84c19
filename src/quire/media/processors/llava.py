"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a picture is one tile, followed in later models by a
grid.

The pixels equal those of transformers' processors, but stay uint8: the model scales them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import PIL.Image

from quire.core.media import Colours, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import Placeholders, VideoProcessor, WholeImageProcessor
from quire.media.processors.qwen import check_stretch
from quire.media.processors.tiles import Tiles, check_room
from quire.media.source import Detail, refusal
from quire.media.video import Frame, VideoInfo

_FRAMES = 32
_SHRINKS_FROM = 1.1
"""A grid of patches is shrunk only if it is longer than allowed by more than this factor."""

Size = tuple[int, int]
"""Rows and columns, or height and width."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """How a whole picture becomes one tile.

    Attributes:
        crop: whether to scale the shorter side to the tile and take the middle, instead of resizing
            the picture to a square.
        pad: whether to pad the picture to a square of the mean colour first.
    """

    tiles: Tiles
    crop: bool
    pad: bool

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Read a processor's settings.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        tiles = Tiles.open(settings, config, 336, patch=14, tower="clip_vision_model")
        tiles.check(settings, "crop_size")
        size = settings.value("size")
        by_shortest = not isinstance(size, dict) or "shortest_edge" in size
        crop = by_shortest and bool(settings.values.get("do_center_crop", True))
        return cls(tiles, crop, bool(settings.values.get("do_pad", False)))

    def fit(self, picture: PIL.Image.Image, param: str) -> PIL.Image.Image:
        """Return a picture as one tile.

        Raises:
            RequestError: the aspect ratio is too extreme.
        """
        check_stretch(picture, param)
        if self.pad:
            picture = padded(picture, self.tiles.colours)
        if not self.crop:
            return self.tiles.squeezed(picture)
        size, short = self.tiles.size, min(picture.size)
        width, height = (int(size * side / short) for side in picture.size)
        left, top = (width - size) // 2, (height - size) // 2
        whole = self.tiles.resized(picture, width, height)
        return whole.crop((left, top, left + size, top + size))


def padded(picture: PIL.Image.Image, colours: Colours) -> PIL.Image.Image:
    """Place a picture in the middle of a square of the mean colour."""
    side = max(picture.size)
    red, green, blue = (int(255 * mean) for mean in colours.mean)
    square = PIL.Image.new("RGB", (side, side), (red, green, blue))
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


class LlavaImageProcessor(WholeImageProcessor):
    """The image processor of LLaVA 1.5."""

    def __init__(self, placeholders: Placeholders, fitting: Fitting) -> None:
        super().__init__(placeholders)
        self._fitting = fitting

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        return cls(_placeholders(config, "image", 32_000), Fitting.open(settings, config))

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        tiles = self._fitting.tiles
        rows = tiles.patches**2
        check_room(param, detail, rows)
        return tiles.item("image", [self._fitting.fit(picture, param)], rows)


@dataclass(frozen=True, slots=True)
class Grids:
    """The grid sizes that a picture may be resized to, and the limit on its patches.

    Attributes:
        sizes: heights and widths in pixels.
        tile: pixels on a tile's side.
        side: patches on a tile's side.
        maximum: limit on a picture's patches, counted in tiles; a picture with more is shrunk. None
            means no limit.
    """

    sizes: tuple[Size, ...]
    tile: int
    side: int
    maximum: int | None = None

    def best(self, height: int, width: int) -> Size:
        """Return the grid size that keeps most of a picture's pixels; of equal ones the
        smallest.
        """

        def worth(size: Size) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            return kept, -size[0] * size[1]

        return max(self.sizes, key=worth)

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of a picture's item, as `AnyResolution` of `models/vision/packing.py`
        reads it.
        """
        down, across = (side // self.tile for side in self.best(height, width))
        rows, columns = down * self.side, across * self.side
        if width / height > columns / rows:
            inner = int(round(height * (columns / width), 7))
            rows -= (rows - inner) // 2 * 2
        else:
            inner = int(round(width * (rows / height), 7))
            columns -= (columns - inner) // 2 * 2
        return (down, across, rows, columns, *self._kept(rows, columns))

    def _kept(self, rows: int, columns: int) -> Size:
        if self.maximum is None:
            return rows, columns
        ratio = math.sqrt(rows * columns / (self.maximum * self.side**2))
        if ratio <= _SHRINKS_FROM:
            return rows, columns
        return int(rows // ratio), int(columns // ratio)

    def rows(self, height: int, width: int) -> int:
        """Return the number of rows of a picture's item."""
        *_, lines, line = self.shape(height, width)
        return self.side**2 + lines * (line + 1)

    def within(self, height: int, width: int, tokens: int) -> Grids | None:
        """Return the grids that give a picture at most `tokens` rows; None if there are none."""
        ones = (replace(self, sizes=(size,)) for size in self.sizes)
        sizes = tuple(one.sizes[0] for one in ones if one.rows(height, width) <= tokens)
        return replace(self, sizes=sizes) if sizes else None


class LlavaNextImageProcessor(WholeImageProcessor):
    """The image processor of LLaVA-NeXT: the whole picture as a tile, then a grid of tiles."""

    def __init__(self, placeholders: Placeholders, fitting: Fitting, grids: Grids) -> None:
        super().__init__(placeholders)
        self._fitting = fitting
        self._tiles = fitting.tiles
        self._grids = grids

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        fitting = Fitting.open(settings, config)
        maximum = cls._maximum(config)
        grids = Grids(
            _sizes(settings, config, fitting.tiles),
            fitting.tiles.size,
            fitting.tiles.patches,
            maximum=maximum,
        )
        return cls(_placeholders(config, "image", cls._usual_token), fitting, grids)

    _usual_token = 32_000

    @classmethod
    def _maximum(cls, config: Values) -> int | None:
        return None

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        check_stretch(picture, param)
        grids = self._grids
        if detail == "low":
            minimum = min(height * width for height, width in grids.sizes)
            sizes = tuple(size for size in grids.sizes if size[0] * size[1] == minimum)
            grids = replace(grids, sizes=sizes)
        elif isinstance(detail, int):
            found = grids.within(picture.height, picture.width, detail)
            if found is None:
                raise refusal(param, f"max_soft_tokens is {detail}, and it takes more at least")
            grids = found
        return self._in_grid(picture, grids)

    def _in_grid(self, picture: PIL.Image.Image, grids: Grids) -> MediaItem:
        height, width = grids.best(picture.height, picture.width)
        down, across = height / picture.height, width / picture.width
        inner = width, min(math.ceil(picture.height * across), height)
        if down <= across:
            inner = min(math.ceil(picture.width * down), width), height
        canvas = PIL.Image.new("RGB", (width, height))
        place = (width - inner[0]) // 2, (height - inner[1]) // 2
        canvas.paste(self._tiles.resized(picture, *inner), place)
        tiles = [self._tiles.squeezed(picture), *self._tiles.grid(canvas)]
        shape = grids.shape(picture.height, picture.width)
        rows = grids.rows(picture.height, picture.width)
        return MediaItem.of(
            "image", self._tiles.features(tiles), shape, tokens=rows, bidirectional=False
        )


class LlavaOnevisionImageProcessor(LlavaNextImageProcessor):
    """The image processor of LLaVA-OneVision: of several pictures, each is one tile, padded to a
    square.
    """

    detail_of_several = "low"
    _usual_token = 151_646

    @classmethod
    def _maximum(cls, config: Values) -> int | None:
        ratio = config.value("vision_aspect_ratio", "anyres_max_9")
        name, _, number = str(ratio).rpartition("_")
        if name != "anyres_max" or not number.isdecimal() or not int(number):
            raise config.error("vision_aspect_ratio", "not anyres_max_ and a number")
        return int(number)

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        height, width = picture.height, picture.width
        alone = detail == "low"
        if isinstance(detail, int):
            alone = self._grids.within(height, width, detail) is None
        if alone:
            return self._alone(picture, param, detail)
        return super().item(picture, param, detail)

    def _alone(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        rows = self._tiles.patches**2 + 1
        check_room(param, detail, rows)
        check_stretch(picture, param)
        tile = self._tiles.squeezed(padded(picture, self._tiles.colours))
        features = self._tiles.features([tile])
        return MediaItem.of("image", features, (0,) * 6, tokens=rows, bidirectional=False)


class LlavaOnevisionVideoProcessor(VideoProcessor):
    """The video processor of LLaVA-OneVision: evenly spaced frames, each resized to a tile, in one
    item.
    """

    def __init__(self, placeholders: Placeholders, tiles: Tiles, maximum: int) -> None:
        super().__init__(placeholders)
        self._tiles = tiles
        self._maximum = maximum

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `video_preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        maximum = settings.integer("num_frames", default=_FRAMES)
        tiles = Tiles.open(settings, config, 384, patch=14)
        return cls(_placeholders(config, "video", 151_647), tiles, maximum)

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        count = min(self._maximum, maximum, info.frames)
        return [int(number * info.frames / count) for number in range(count)]

    def preprocess(
        self, info: VideoInfo, frames: Iterator[Frame], count: int, param: str, detail: Detail
    ) -> Parts:
        tiles = [self._tiles.squeezed(frame.picture) for frame in frames]
        rows = len(tiles) * (-(-self._tiles.patches // 2)) ** 2 + 1
        features = self._tiles.features(tiles)
        return (
            MediaPart(
                MediaItem.of("video", features, (len(tiles),), tokens=rows, bidirectional=False)
            ),
        )


def _sizes(settings: Values, config: Values, tiles: Tiles) -> tuple[Size, ...]:
    """Return the grid sizes that the settings name, or else the model's configuration.

    Raises:
        ModelError: the value is not a list of pairs of multiples of a tile's side.
    """
    key = "image_grid_pinpoints"
    source = settings if settings.value(key) else config
    found = source.value(key)
    whole = isinstance(found, list) and all(
        isinstance(each, list | tuple)
        and len(each) == 2
        and all(type(side) is int and side > 0 and not side % tiles.size for side in each)
        for each in found
    )
    if not found or not whole:
        raise source.error(key, f"not a list of heights and widths, multiples of {tiles.size}")
    return tuple((height, width) for height, width in found)


def _placeholders(config: Values, kind: str, default: int) -> Placeholders:
    """Return the token that chat templates write for a picture or video; its rows replace it."""
    names = f"{kind}_token_index", f"{kind}_token_id"
    return Placeholders(config.integer(*names, default=default, minimum=0))
