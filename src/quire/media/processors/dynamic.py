"""InternVL, Aya Vision and GOT-OCR 2.0: a picture is cut into tiles whose number follows its shape.

The pixels equal those of transformers' `GotOcr2ImageProcessorPil`, but stay uint8: the model scales
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import PIL.Image

from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import ImageProcessor, Placeholders, VideoProcessor
from quire.media.processors.tiles import Tiles, check_room
from quire.media.source import Detail
from quire.media.video import Frame, VideoInfo

_FRAMES = 8


def most_alike(height: int, width: int, size: int, minimum: int, maximum: int) -> tuple[int, int]:
    """Return the rows and columns of the grid of tiles whose shape is closest to the picture's.

    Of equally close grids the largest is taken that the picture fills at least half.

    Args:
        size: pixels on a tile's side.
    """
    grids = [
        (down, across)
        for across in range(1, maximum + 1)
        for down in range(1, maximum + 1)
        if minimum <= down * across <= maximum
    ]
    best, difference = (1, 1), float("inf")
    for down, across in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        found = abs(width / height - across / down)
        filled = height * width > 0.5 * size**2 * down * across
        if found < difference or (found == difference and filled):
            best, difference = (down, across), found
    return best


@dataclass(frozen=True, slots=True)
class Cutting:
    """How pictures are cut into tiles.

    Attributes:
        minimum, maximum: bounds of a picture's tiles, not counting the tile that shows all of it.
    """

    tiles: Tiles
    rows: int
    minimum: int
    maximum: int

    @classmethod
    def open(
        cls, settings: Values, config: Values, square: int, *, size: int = 384, patch: int = 14
    ) -> Self:
        """Read a processor's settings. A tile becomes one row for each `square` x `square` patches.

        Args:
            size, patch: default sides of a tile and of a patch, in pixels.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        tiles = Tiles.open(settings, config, size, patch=patch)
        minimum, maximum = (
            settings.integer("min_patches", default=1),
            settings.integer("max_patches", default=12),
        )
        if minimum > maximum:
            raise settings.error("min_patches", f"over max_patches, {maximum}")
        return cls(tiles, (tiles.patches // square) ** 2, minimum, maximum=maximum)

    def grid(self, height: int, width: int, maximum: int) -> tuple[int, int]:
        """Return the rows and columns of at most `maximum` tiles, by `most_alike`."""
        return most_alike(
            height, width, self.tiles.size, minimum=min(self.minimum, maximum), maximum=maximum
        )

    def cut(self, picture: PIL.Image.Image, param: str, detail: Detail) -> list[PIL.Image.Image]:
        """Cut a picture into tiles. If there are several, the last one shows the whole picture.

        Raises:
            RequestError: the picture would have more rows than `detail` allows.
        """
        check_room(param, detail, self.rows)
        maximum = 1 if detail == "low" else self.maximum
        if isinstance(detail, int):
            room = detail // self.rows
            maximum = max(1, min(maximum, room - 1))
        down, across = self.grid(picture.height, picture.width, maximum)
        if down * across == 1:
            return [self.tiles.squeezed(picture)]
        size = self.tiles.size
        whole = self.tiles.resized(picture, across * size, down * size)
        return [*self.tiles.grid(whole), self.tiles.squeezed(picture)]


class InternVLImageProcessor(ImageProcessor):
    """The image processor of InternVL: all tiles form one item."""

    def __init__(self, placeholders: Placeholders, cutting: Cutting) -> None:
        super().__init__(placeholders)
        self._cutting = cutting

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        placeholders = Placeholders(config.integer("image_token_id", default=151_667, minimum=0))
        return cls(placeholders, Cutting.open(settings, config, internvl_square(config)))

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        tiles = self._cutting.cut(picture, param, detail)
        item = self._cutting.tiles.item("image", tiles, self._cutting.rows)
        return (MediaPart(item, "<img>", "</img>"),)


class InternVLVideoProcessor(VideoProcessor):
    """The video processor of InternVL: frames from the middles of equal parts, each a numbered
    item.
    """

    def __init__(self, placeholders: Placeholders, cutting: Cutting, maximum: int) -> None:
        super().__init__(placeholders)
        self._cutting = cutting
        self._maximum = maximum

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `video_preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        token = config.integer("image_token_id", default=151_667, minimum=0)
        cutting = Cutting.open(settings, config, internvl_square(config))
        maximum = settings.integer("num_frames", default=_FRAMES)
        return cls(Placeholders(token, mark="<video>"), cutting, maximum)

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        count = min(self._maximum, maximum, info.frames)
        return [int((number + 0.5) * info.frames / count) for number in range(count)]

    def preprocess(
        self, info: VideoInfo, frames: Iterator[Frame], count: int, param: str, detail: Detail
    ) -> Parts:
        cutting = self._cutting
        check_room(param, detail, cutting.rows)
        parts: list[MediaPart] = []
        for number, frame in enumerate(frames, start=1):
            tile = cutting.tiles.squeezed(frame.picture)
            item = cutting.tiles.item("video", [tile], cutting.rows)
            line = "\n" if parts else ""
            parts.append(MediaPart(item, f"{line}Frame{number}: <img>", "</img>"))
        return tuple(parts)


class AyaImageProcessor(ImageProcessor):
    """The image processor of Aya Vision: each tile is a numbered item; the last shows the whole
    picture.
    """

    def __init__(self, placeholders: Placeholders, cutting: Cutting) -> None:
        super().__init__(placeholders)
        self._cutting = cutting

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        token = config.integer("image_token_index", default=255_036, minimum=0)
        square = config.integer("downsample_factor", default=2)
        return cls(Placeholders(token, mark="<image>"), Cutting.open(settings, config, square))

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        tiles, cutting = self._cutting.cut(picture, param, detail), self._cutting
        parts: list[MediaPart] = []
        for number, tile in enumerate(tiles, start=1):
            last = number == len(tiles)
            before, after = self._around(number, last=last)
            start, end = "" if parts else "<|START_OF_IMG|>", "<|END_OF_IMG|>" if last else ""
            item = cutting.tiles.item("image", [tile], cutting.rows)
            parts.append(MediaPart(item, start + before, after + end))
        return tuple(parts)

    def _around(self, number: int, *, last: bool) -> tuple[str, str]:
        """Return the texts before and after a tile. The last tile shows the whole picture."""
        return "TILE_GLOBAL" if last else f"TILE_{number}", ""


class GotImageProcessor(InternVLImageProcessor):
    """The image processor of GOT-OCR 2.0: one tile, unless the settings ask to cut."""

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        token = config.integer("image_token_id", "image_token_index", default=151_859, minimum=0)
        cutting = Cutting.open(settings, config, square=4, size=1024, patch=16)
        if not settings.flag("crop_to_patches", default=False):
            cutting = replace(cutting, minimum=1, maximum=1)
        return cls(Placeholders(token), cutting)


def open_dynamic(settings: Values, config: Values) -> ImageProcessor:
    """Open the processor of a model whose settings name the one of GOT-OCR 2.

    Raises:
        ModelError: see `InternVLImageProcessor.open`.
    """
    kind = _BY_MODEL.get(str(config.value("model_type")), InternVLImageProcessor)
    return kind.open(settings, config)


_BY_MODEL: dict[str, type[AyaImageProcessor | InternVLImageProcessor]] = {
    "aya_vision": AyaImageProcessor,
    "got_ocr2": GotImageProcessor,
}


def internvl_square(config: Values) -> int:
    """Return the patches on the side of the square that becomes one row.

    Raises:
        ModelError: `downsample_ratio` is out of range.
    """
    ratio = config.number("downsample_ratio", default=0.5, minimum=0)
    if not 0 < ratio <= 1:
        raise config.error("downsample_ratio", "not above 0 and at most 1")
    return int(1 / ratio)
