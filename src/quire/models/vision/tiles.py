"""Decoders that see pictures as tiles of one size, encoded by a transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import mlx.core as mx

from quire.core.errors import RequestError
from quire.core.media import Pieces
from quire.models.base import CutEncoder, Encoding, MediaEncoder, Module
from quire.models.decoder import DecoderModel
from quire.models.vision.packing import Packing
from quire.models.vision.projectors import Projector, check_squares
from quire.models.weights.names import Weights

_PATCHES_AT_ONCE = 1024
"""Patches encoded at once: products of fewer rows are slower per row."""

TILES = ("visual.", "vision_tower.", "multi_modal_projector.", "image_newline")
"""Prefixes of the encoder's tensors in checkpoints. This package uses the first for all."""


class TileTransformer(Protocol):
    """Description of an encoder of tiles; implementations are frozen dataclasses."""

    @property
    def depth(self) -> int:
        """Number of layers."""
        ...

    @property
    def side(self) -> int:
        """Patches on a tile's side."""
        ...

    @property
    def patches(self) -> int:
        """Number of patches of a tile."""
        ...

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's pixels."""
        ...

    @property
    def output_size(self) -> int:
        """Values that the encoder computes of a patch."""
        ...

    def module(self) -> Module:
        """Return the module. Its `encode` takes uint8 `[tiles, patches, patch * patch * 3]`, yields
        after each layer, and returns an array of all patches' outputs first.
        """
        ...


class TiledVision(Module):
    """An encoder of tiles and its projector.

    Args:
        multiplier: factor of an item's rows.
    """

    def __init__(
        self,
        kind: TileTransformer,
        projector: Projector,
        width: int,
        *,
        newline: bool,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        check_squares(kind.side, projector.square)
        self.kind = kind
        self.side = kind.side // projector.square
        self.vision_tower = kind.module()
        self.multi_modal_projector = projector.module(kind.output_size, width)
        self._newline = newline
        if newline:
            self.image_newline = mx.zeros((width,))

    @property
    def line_end(self) -> mx.array | None:
        """The row that ends a line of patches, `[width]`; None if there is none."""
        found: mx.array | None = self.image_newline if self._newline else None
        return found

    def encode(self, pixels: mx.array) -> Encoding:
        """Encode uint8 `[tiles, patches, patch * patch * 3]` to `[tiles, side * side, width]`."""
        x, *_ = yield from self.vision_tower.encode(pixels)
        side = self.kind.side
        return (self.multi_modal_projector(x.reshape(len(x), side, side, -1)),)


class TileEncoder(CutEncoder):
    """The encoder of pictures or videos as tiles.

    Tiles are independent, so a piece is one layer of a few tiles.
    """

    def __init__(self, visual: TiledVision, packing: Packing, noun: str) -> None:
        super().__init__()
        self.visual = visual
        self._packing = packing
        self._noun = noun

    @property
    def example_shape(self) -> tuple[int, ...]:
        return self._packing.example_shape

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return self._packing.tiles(shape) * self.visual.kind.tile_bytes

    def rows(self, shape: tuple[int, ...]) -> int:
        if self._packing.tiles(shape) < 1:
            raise RequestError(f"{self._noun} of shape {shape} has no tiles.")
        return self._packing.rows(shape, self.visual.side)

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        kind, tiles = self.visual.kind, self._packing.tiles(shape)
        together = min(tiles, self._together)
        parts = -(-tiles // together)
        return Pieces(parts * (kind.depth + 1), together * kind.patches)

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        tiles = self._packing.tiles(shape)
        pixels = features.reshape(tiles, self.visual.kind.patches, -1)
        made: list[mx.array] = []
        for first in range(0, tiles, self._together):
            if made:
                yield (made[-1],)
            made += yield from self.visual.encode(pixels[first : first + self._together])
        rows = self._packing(mx.concatenate(made), shape, self.visual.line_end)
        factor = self.visual.multiplier
        return (rows if factor == 1 else rows * factor,)

    @property
    def _together(self) -> int:
        """Number of tiles that are encoded together."""
        return max(1, _PATCHES_AT_ONCE // self.visual.kind.patches)


class TiledModel(DecoderModel):
    """A decoder with an encoder of tiles; without its tensors, a model of text only.

    Args:
        text: the decoder, whose description and names are used.
        packings: packing of each media kind.
        visual_names: converts the encoder's tensors to this package's names and layouts.
        prepare: converts a checkpoint's names to transformers' names of the family.
        multiplier: see `TiledVision`.
    """

    def __init__(
        self,
        text: DecoderModel,
        kind: TileTransformer,
        projector: Projector,
        packings: Mapping[str, Packing],
        visual_names: Callable[[Weights], Weights],
        prepare: Callable[[Weights], Weights] | None,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(text.description, text.names)
        newline = any(packing.newline for packing in packings.values())
        width = text.description.hidden_size
        self.visual: TiledVision | None = TiledVision(
            kind, projector, width, newline=newline, multiplier=multiplier
        )
        self._packings = packings
        self._visual_names = visual_names
        self._prepare = prepare

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        if self.visual is None:
            return {}
        return {
            kind: TileEncoder(self.visual, packing, _NOUNS[kind])
            for kind, packing in self._packings.items()
        }

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text: Weights = {}
        visual: Weights = {}
        ready = weights if self._prepare is None else self._prepare(weights)
        for name, array in ready.items():
            plain = name.removeprefix("model.").removeprefix("language_model.")
            if plain.startswith(TILES):
                visual[plain] = array
            else:
                text[name] = array
        if not visual:
            # Text-only conversions keep the configuration of the encoder that they left out.
            self.visual = None
        translated = self._visual_names(visual)
        return super().sanitize(text) | {f"visual.{n}": array for n, array in translated.items()}


_NOUNS = {"image": "An image", "video": "A video"}
