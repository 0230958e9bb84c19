"""Tiles: square pictures of the fixed size that CLIP, SigLIP and similar encoders take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import PIL.Image

from quire.core.media import TOWER_COLOURS, Colours, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import ImageProcessor, Placeholders, check_pixels
from quire.media.source import Detail, refusal

FILTERS = (
    PIL.Image.Resampling.LANCZOS,
    PIL.Image.Resampling.BILINEAR,
    PIL.Image.Resampling.BICUBIC,
)
"""Accepted filters for resizing, as `resample` numbers them."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The geometry of a model's tiles.

    Attributes:
        size: pixels on a side.
        patch: pixels on a patch's side; pixels beyond the last whole patch are dropped.
        filter: the filter that resizes pictures.
        colours: the model's pixel normalisation.
    """

    size: int
    patch: int
    filter: PIL.Image.Resampling
    colours: Colours

    @classmethod
    def open(
        cls,
        settings: Values,
        config: Values,
        size: int,
        patch: int,
        *,
        filter: int = 3,
        tower: str = "siglip_vision_model",
    ) -> Self:
        """Read a processor's settings and `config.json`. The arguments are defaults.

        Raises:
            ModelError: a value asks for pixels other than the model is shown.
        """
        vision = config.nested("vision_config", needed=False)
        tower = vision.value("model_type", tower)
        if tower not in TOWER_COLOURS:
            raise vision.error("model_type", f"not one of {', '.join(TOWER_COLOURS)}")
        number = settings.values.get("resample", filter)
        if number not in FILTERS:
            raise settings.error("resample", "not one of 1, 2 and 3")
        check_pixels(settings, TOWER_COLOURS[tower], resample=number)
        found = cls(
            side_of(vision, "image_size", size),
            side_of(vision, "patch_size", patch),
            PIL.Image.Resampling(number),
            colours=TOWER_COLOURS[tower],
        )
        found.check(settings, "size")
        return found

    def check(self, settings: Values, key: str) -> None:
        """Refuse settings whose sides under `key` differ from a tile's.

        Raises:
            ModelError: a side differs; the message names the key.
        """
        sides = settings.value(key)
        if sides is None:
            return
        given = set(sides.values()) if isinstance(sides, dict) else {sides}
        if given != {self.size}:
            raise settings.error(key, f"and the encoder takes {self.size} by {self.size} pixels")

    @property
    def patches(self) -> int:
        """Patches on a tile's side."""
        return self.size // self.patch

    def squeezed(self, picture: PIL.Image.Image) -> PIL.Image.Image:
        """Resize a whole picture to one tile."""
        return self.resized(picture, self.size, self.size)

    def resized(self, picture: PIL.Image.Image, width: int, height: int) -> PIL.Image.Image:
        same = picture.size == (width, height)
        return picture if same else picture.resize((width, height), self.filter)

    def grid(self, picture: PIL.Image.Image) -> list[PIL.Image.Image]:
        """Cut a picture, whose sides are multiples of a tile's, into tiles, row by row."""
        size = self.size
        return [
            picture.crop((left, top, left + size, top + size))
            for top in range(0, picture.height, size)
            for left in range(0, picture.width, size)
        ]

    def features(self, tiles: Sequence[PIL.Image.Image]) -> bytes:
        """Return the bytes of `[tiles, rows, columns, patch, patch, 3]`."""
        count, patch = self.patches, self.patch
        seen = count * patch
        pixels = np.stack([np.asarray(tile)[:seen, :seen] for tile in tiles])
        grid = pixels.reshape(len(tiles), count, patch, count, patch, 3)
        return grid.swapaxes(2, 3).tobytes()

    def item(self, kind: str, tiles: Sequence[PIL.Image.Image], rows: int) -> MediaItem:
        """Return tiles as one item, with `rows` rows for each tile."""
        shape = (len(tiles),)
        features = self.features(tiles)
        return MediaItem.of(kind, features, shape, tokens=len(tiles) * rows, bidirectional=False)


def side_of(settings: Values, key: str, default: int) -> int:
    """Return a number of pixels that is given once or for both sides.

    Raises:
        ModelError: the sides differ, or the value is not a number of pixels.
    """
    value = settings.value(key)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        settings = settings.like({key: value[0]})
    return settings.integer(key, default=default)


def check_room(param: str, detail: Detail, rows: int) -> None:
    """Refuse a picture that needs at least `rows` tokens if `detail` allows fewer.

    Raises:
        RequestError: `detail` is too low; the message names both numbers.
    """
    if isinstance(detail, int) and detail < rows:
        raise refusal(param, f"max_soft_tokens is {detail}, and it takes at least {rows}")


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """Cuts long pictures into parts for Gemma 3. The parts follow the whole picture.

    Attributes:
        least: the least pixels of a part's shorter side.
        most: the most parts of a picture.
        ratio: the ratio of longer to shorter side from which on a picture is cut.
    """

    least: int
    most: int
    ratio: float

    @classmethod
    def open(cls, settings: Values) -> Self | None:
        """Read a processor's settings. Return None if they do not ask for parts."""
        if not settings.flag("do_pan_and_scan", default=False):
            return None
        return cls(
            settings.integer("pan_and_scan_min_crop_size", default=256),
            settings.integer("pan_and_scan_max_num_crops", default=4),
            settings.positive("pan_and_scan_min_ratio_to_activate", default=1.2),
        )

    def parts(self, picture: PIL.Image.Image) -> list[PIL.Image.Image]:
        """Cut a picture across its longer side. Return no parts if they would be too small."""
        width, height = picture.size
        long, short = max(width, height), min(width, height)
        if long / short < self.ratio:
            return []
        count = min(max(min(long // self.least, int(long / short + 0.5)), 2), self.most)
        step = -(-long // count)
        if min(step, short) < self.least:
            return []
        ends = [(start, min(start + step, long)) for start in range(0, count * step, step)]
        wide = width >= height
        return [
            picture.crop((start, 0, end, height) if wide else (0, start, width, end))
            for start, end in ends
        ]


class Gemma3ImageProcessor(ImageProcessor):
    """The image processor of Gemma 3: a picture is one tile, perhaps followed by tiles of its
    parts.
    """

    def __init__(
        self, placeholders: Placeholders, tiles: Tiles, rows: int, scan: PanAndScan | None
    ) -> None:
        super().__init__(placeholders)
        self._tiles = tiles
        self._rows = rows
        self._scan = scan

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        token = config.integer("image_token_index", default=262_144, minimum=0)
        rows = config.integer("mm_tokens_per_image", default=256)
        tiles = Tiles.open(settings, config, 224, patch=16, filter=2)
        return cls(Placeholders(token, mark=_BEGIN), tiles, rows, scan=PanAndScan.open(settings))

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        check_room(param, detail, self._rows)
        parts = [] if self._scan is None else self._scan.parts(picture)
        if not parts or (isinstance(detail, int) and detail < self._rows * (1 + len(parts))):
            return (self._part(picture),)
        whole = self._part(picture, before=_WHOLE, after=_PARTS)
        first, *others = parts
        return (whole, self._part(first), *(self._part(each, before=" ") for each in others))

    def _part(self, picture: PIL.Image.Image, before: str = "", after: str = "") -> MediaPart:
        """Return a picture as one tile, within the model's image tokens and further text."""
        features = self._tiles.features([self._tiles.squeezed(picture)])
        item = MediaItem.of("image", features, (1,), tokens=self._rows)
        return MediaPart(item, f"{before}\n\n{_BEGIN}", f"{_END}\n\n{after}")


_WHOLE = "Here is the original image "
_PARTS = " and here are some crops to help you see better "
_BEGIN, _END = "<start_of_image>", "<end_of_image>"
