"""LFM2-VL: a picture of any shape, or a grid of square tiles followed by the whole picture.

Each tile is an item, since tiles do not see each other and text stands between them. The pixels
equal those of transformers' `Lfm2VlImageProcessor`, but for the rounding of Pillow's resizing, and
stay uint8: the model scales them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import PIL.Image

from quire.core.media import EVEN_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import BILINEAR, ImageProcessor, Placeholders, check_pixels
from quire.media.processors.dynamic import most_alike
from quire.media.processors.qwen import LOW_DETAIL, check_stretch, patches, resized
from quire.media.processors.tiles import FILTERS, check_room
from quire.media.source import Detail

_BEGIN, _END = "<|image_start|>", "<|image_end|>"
_WHOLE = "<|img_thumbnail|>"

Grid = tuple[int, int]
"""Rows and columns."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The unit of a picture that becomes one row: a square of patches. All sides are multiples of
    its side.

    Attributes:
        patch: pixels on a patch's side.
        merge: patches on a square's side.
        minimum, maximum: bounds of the rows of a whole picture.
        filter: the filter that resizes pictures.
    """

    patch: int
    merge: int
    minimum: int
    maximum: int
    filter: PIL.Image.Resampling

    @property
    def side(self) -> int:
        """Pixels on the side of a square."""
        return self.patch * self.merge

    def fitted(self, height: int, width: int, most: float) -> Grid:
        """Return the rows and columns of squares of a whole picture, at most `most` squares if
        possible.
        """
        rows, columns = (max(1, round(side / self.side)) for side in (height, width))
        maximum = min(self.maximum, most)
        if rows * columns > maximum:
            shrink = math.sqrt(height * width / (maximum * self.side**2))
            rows, columns = (
                max(1, math.floor(side / shrink / self.side)) for side in (height, width)
            )
        elif rows * columns < min(self.minimum, most):
            grow = math.sqrt(self.minimum * self.side**2 / (height * width))
            larger = [math.ceil(side * grow / self.side) for side in (height, width)]
            if larger[0] * larger[1] <= most:
                rows, columns = larger
        return rows, columns

    def item(self, picture: PIL.Image.Image, grid: Grid) -> MediaItem:
        """Resize a picture to a grid of squares and return it as an item."""
        rows, columns = (side * self.side for side in grid)
        pixels = resized(picture, rows, columns, filter=self.filter)[None]
        cut = patches(pixels, self.patch, self.merge)
        shape = grid[0] * self.merge, grid[1] * self.merge
        tokens = grid[0] * grid[1]
        return MediaItem.of("image", cut.tobytes(), shape, tokens=tokens, bidirectional=False)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How large pictures are split into tiles.

    Attributes:
        side: squares on a tile's side.
        minimum, maximum: bounds of a picture's tiles.
        pixels: a picture with more pixels is split.
        whole: whether the whole picture follows its tiles.
    """

    side: int
    minimum: int
    maximum: int
    pixels: float
    whole: bool


class LfmImageProcessor(ImageProcessor):
    """The image processor of LFM2-VL.

    Args:
        splitting: how large pictures are split; None splits none.
    """

    def __init__(
        self, placeholders: Placeholders, cells: Cells, splitting: Splitting | None
    ) -> None:
        super().__init__(placeholders)
        self._cells = cells
        self._splitting = splitting

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels or texts than this class computes.
        """
        # Published files set `do_resize` to false, but their processor does not read it.
        read = {key: value for key, value in settings.values.items() if key != "do_resize"}
        number = settings.value("resample", BILINEAR)
        if number not in FILTERS:
            raise settings.error("resample", "not one of 1, 2 and 3")
        check_pixels(settings.like(read), EVEN_COLOURS, number)
        for source in (settings, config):
            source.only("use_image_special_tokens", True)
        token = config.integer("image_token_id", "image_token_index", default=396, minimum=0)
        cells = _cells(settings, config, PIL.Image.Resampling(number))
        return cls(Placeholders(token), cells, _splitting(settings, cells))

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        check_stretch(picture, param)
        cells, split = self._cells, self._splitting
        low = LOW_DETAIL if detail == "low" else math.inf
        most = detail if isinstance(detail, int) else low
        whole = cells.fitted(picture.height, picture.width, most)
        down, across = (1, 1) if split is None else self._grid(picture, split, whole, most=most)
        if split is None or down * across == 1:
            check_room(param, detail, whole[0] * whole[1])
            return (MediaPart(cells.item(picture, whole), _BEGIN, _END),)
        side, pixels = split.side, split.side * cells.side
        canvas = picture.resize((across * pixels, down * pixels), cells.filter)
        parts: list[MediaPart] = []
        for row in range(down):
            for column in range(across):
                left, top = column * pixels, row * pixels
                tile = canvas.crop((left, top, left + pixels, top + pixels))
                start = "" if parts else _BEGIN
                name = f"<|img_row_{row + 1}_col_{column + 1}|>"
                parts.append(MediaPart(cells.item(tile, (side, side)), start + name))
        if split.whole:
            parts.append(MediaPart(cells.item(picture, whole), _WHOLE))
        last = parts[-1]
        return (*parts[:-1], MediaPart(last.item, last.before, _END))

    def _grid(self, picture: PIL.Image.Image, split: Splitting, whole: Grid, most: float) -> Grid:
        """Return the rows and columns of tiles. One tile means that the picture is read whole."""
        cells, size = self._cells, (picture.height, picture.width)
        high, wide = (max(cells.patch, round(side / cells.side) * cells.side) for side in size)
        maximum = split.maximum
        if most < math.inf:
            room = most - whole[0] * whole[1] * split.whole
            maximum = min(maximum, int(room // split.side**2))
        if high * wide <= split.pixels or maximum < 2:
            return 1, 1
        tile = split.side * cells.side
        return most_alike(*size, size=tile, minimum=min(split.minimum, maximum), maximum=maximum)


def _cells(settings: Values, config: Values, filter: PIL.Image.Resampling) -> Cells:
    """Return the unit that becomes one row. Raise if the settings and the encoder disagree."""
    vision = config.nested("vision_config", needed=False)
    patch, merge = (
        vision.integer("patch_size", default=16),
        config.integer("downsample_factor", default=2),
    )
    for key, encoders in (("encoder_patch_size", patch), ("downsample_factor", merge)):
        if settings.integer(key, default=encoders) != encoders:
            raise settings.error(key, f"and the encoder's is {encoders}")
    minimum, maximum = (
        settings.integer("min_image_tokens", default=64),
        settings.integer("max_image_tokens", default=256),
    )
    if minimum > maximum:
        raise settings.error("min_image_tokens", f"over max_image_tokens, {maximum}")
    return Cells(patch, merge, minimum, maximum=maximum, filter=filter)


def _splitting(settings: Values, cells: Cells) -> Splitting | None:
    """Read how large pictures are split; None if they are not."""
    minimum, maximum = (
        settings.integer("min_tiles", default=2),
        settings.integer("max_tiles", default=10),
    )
    if not settings.flag("do_image_splitting", default=True) or maximum == 1 == minimum:
        return None
    if minimum > maximum:
        raise settings.error("min_tiles", f"over max_tiles, {maximum}")
    size = settings.integer("tile_size", default=512)
    if size % cells.side:
        raise settings.error("tile_size", f"no multiple of {cells.side} pixels, which make a row")
    tolerance = settings.positive("max_pixels_tolerance", default=2.0)
    return Splitting(
        side=size // cells.side,
        minimum=minimum,
        maximum=maximum,
        pixels=cells.maximum * cells.side**2 * tolerance,
        whole=settings.flag("use_thumbnail", default=True),
    )
