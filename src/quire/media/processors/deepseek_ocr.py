"""DeepSeek-OCR 1 and 2: a large picture is cut into tiles, and all of it is one more view.

The pixels equal those of the published code and, of DeepSeek-OCR 2, transformers'
`DeepseekOcr2ImageProcessorPil`, but stay uint8: the model scales them.
"""

from __future__ import annotations

from typing import Self

import PIL.Image
import PIL.ImageOps

from quire.core.media import EVEN_COLOURS, MediaItem
from quire.core.original_configs import OCR_TILES, QUERIES
from quire.core.values import Values
from quire.media.processors.base import Placeholders, WholeImageProcessor, check_pixels
from quire.media.processors.dynamic import most_alike
from quire.media.processors.qwen import check_stretch
from quire.media.processors.tiles import Tiles, check_room, side_of
from quire.media.source import Detail

_GREY = (127, 127, 127)
_PATCHES = 4
"""Patches along each side of the square that becomes one row."""


class OcrImageProcessor(WholeImageProcessor):
    """The image processor of both models.

    Args:
        whole, tile: geometry of the view of a whole picture, and of its tiles.
        bounds: the least and most tiles of a picture larger than a tile.
        lines: whether a row ends each line of a view, as in the first model.
        halves_down: whether half a pixel beside a picture is dropped, as transformers does.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        *,
        whole: Tiles,
        tile: Tiles,
        bounds: tuple[int, int],
        lines: bool,
        halves_down: bool,
    ) -> None:
        super().__init__(placeholders)
        self._whole, self._tile = whole, tile
        self._bounds = bounds
        self._lines = lines
        self._halves_down = halves_down

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json`, if any, and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        check_pixels(settings, EVEN_COLOURS)
        vision = config.nested("vision_config")
        sam = vision.nested("sam_config", needed=False)
        second = vision.nested("encoder_config", needed=False).value("model_type", QUERIES)
        if second not in OCR_TILES:
            raise vision.error("encoder_config", f"not one of {', '.join(OCR_TILES)}")
        share, of = OCR_TILES[second]
        patch, size = side_of(sam, "patch_size", 16), side_of(sam, "image_size", 1024)
        filter = PIL.Image.Resampling.BICUBIC
        whole = Tiles(size, patch, filter, colours=EVEN_COLOURS)
        tile = Tiles(size // patch * share // of * patch, patch, filter, colours=EVEN_COLOURS)
        theirs = config.value("model_type") == "deepseek_ocr2"
        if theirs:
            whole.check(settings, "size")
            tile.check(settings, "tile_size")
            settings.neutral({"background_color": list(_GREY), "crop_to_patches": True})
        token = config.integer("image_token_id", default=128_815, minimum=0)
        lines = second != QUERIES
        return cls(
            Placeholders(token),
            whole=whole,
            tile=tile,
            bounds=(
                settings.integer("min_patches", default=2),
                settings.integer("max_patches", default=9 if lines else 6),
            ),
            lines=lines,
            halves_down=theirs,
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        check_stretch(picture, param)
        check_room(param, detail, self._rows(0, 0))
        down, across = self._grid(picture, detail)
        features = b""
        if down:
            size = self._tile.size
            large = self._tile.resized(picture, across * size, down * size)
            features = self._tile.features(self._tile.grid(large))
        features += self._whole.features([self._on_square(picture)])
        rows = self._rows(down, across)
        return MediaItem.of("image", features, (down, across), tokens=rows, bidirectional=False)

    def _grid(self, picture: PIL.Image.Image, detail: Detail) -> tuple[int, int]:
        """Return the rows and columns of tiles; none for small pictures and low detail."""
        minimum, maximum = self._bounds
        if detail == "low" or max(picture.size) <= self._tile.size:
            return 0, 0
        for most in range(maximum, minimum - 1, -1):
            found = most_alike(
                picture.height, picture.width, self._tile.size, minimum=minimum, maximum=most
            )
            if not isinstance(detail, int) or self._rows(*found) <= detail:
                return found
        return 0, 0

    def _rows(self, down: int, across: int) -> int:
        """Return the rows of a picture of so many tiles."""
        ends = int(self._lines)
        side, whole = (-(-each.patches // _PATCHES) for each in (self._tile, self._whole))
        return down * side * (across * side + ends) + whole * (whole + ends) + 1

    def _on_square(self, picture: PIL.Image.Image) -> PIL.Image.Image:
        """Place a picture in the middle of a grey square, which it touches on two sides."""
        size = self._whole.size
        if not self._halves_down:
            return PIL.ImageOps.pad(picture, (size, size), color=_GREY)
        width, height = (round(side * (size / max(picture.size))) for side in picture.size)
        square = PIL.Image.new("RGB", (size, size), _GREY)
        place = (size - width) // 2, (size - height) // 2
        square.paste(self._whole.resized(picture, width, height), place)
        return square
