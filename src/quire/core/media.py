"""Media as the engine sees it: items of any kind, ready for the encoder of that kind."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colours:
    """The pixel normalisation of a model: `(byte / 255 - mean) / std`, for red, green and blue."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


RAW_COLOURS = Colours((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""Normalisation to the range from 0 to 1."""
CLIP_COLOURS = Colours((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""The normalisation of CLIP (arXiv:2103.00020)."""
EVEN_COLOURS = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Normalisation to the range from -1 to 1."""
IMAGENET_COLOURS = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The normalisation of ImageNet."""
TOWER_COLOURS = {
    "clip_vision_model": CLIP_COLOURS,
    "siglip_vision_model": EVEN_COLOURS,
    "got_ocr2_vision": CLIP_COLOURS,
    "internvl_vision": IMAGENET_COLOURS,
}
"""Pixel normalisation of encoders by `model_type`."""


LEARNED_ROWS = 5
"""Number of learned rows before an image's patches, in models whose decoder reads patches itself
(Falcon).
"""

MediaKey = tuple[str, bytes]
"""An item's kind and digest. Items with equal keys have equal rows."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """How an encoder cuts its work on one item.

    Attributes:
        count: number of pieces, of about equal cost.
        rows: hidden states of one piece. Its cost is learned by this number.
        together: the most items of one shape whose pieces are computed by one call.
    """

    count: int
    rows: int
    together: int = 1


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MediaItem:
    """An image or another piece of media, as its kind's encoder takes it.

    Attributes:
        kind: "image", "audio", "video", or another that has a processor and an encoder.
        features: the encoder's input; of images uint8 `[rows * columns, size * size * 3]`: patch
            after patch, in the order that the encoder wants; within a patch row by row, red, green
            and blue of each pixel together. Of sound float32 `[frames, bins]`, the logarithms of a
            mel spectrogram.
        shape: of the features, as the kind counts it; of images rows and columns of patches, of
            sound frames and bins.
        tokens: number of placeholders in a prompt, which is the number of rows that the encoder
            makes.
        digest: hash of kind, features and shape. Equal digests mean equal rows.
        bidirectional: whether its rows see each other, in layers that support it.
    """

    kind: str
    features: bytes
    shape: tuple[int, ...]
    tokens: int
    digest: bytes
    bidirectional: bool = True

    @property
    def key(self) -> MediaKey:
        """The key of the item's rows in caches."""
        return self.kind, self.digest

    @classmethod
    def of(
        cls,
        kind: str,
        features: bytes,
        shape: tuple[int, ...],
        tokens: int,
        *,
        bidirectional: bool = True,
    ) -> MediaItem:
        """Return an item with its digest."""
        digest = hashlib.blake2b(features, digest_size=24, person=kind.encode())
        for size in shape:
            digest.update(size.to_bytes(4, "little"))
        return cls(
            kind,
            features,
            shape,
            tokens=tokens,
            digest=digest.digest(),
            bidirectional=bidirectional,
        )


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """An item, and the position in the prompt of its first placeholder."""

    start: int
    item: MediaItem

    @property
    def end(self) -> int:
        """One past the position of its last placeholder."""
        return self.start + self.item.tokens


def sound_rows(moments: int, squares: int, step: int, rate: int, sounds: int) -> list[bool]:
    """Return the rows of a video with sound that are sound.

    Pictures and sound are merged by time; at equal times the picture comes first (Qwen3-Omni,
    arXiv:2509.17765, section 2.2).

    Args:
        moments: number of moments of the video.
        squares: rows of each moment.
        step: microseconds from a moment to the next.
        rate: rows of sound per second.
        sounds: number of rows of sound.
    """
    rows: list[bool] = []
    done = 0
    for moment in range(moments):
        before = min(sounds, -(-moment * step * rate // 1_000_000))
        rows += [True] * (before - done) + [False] * squares
        done = before
    return rows + [True] * (sounds - done)


@dataclass(frozen=True, slots=True)
class CrossMedia:
    """Items that consecutive tokens attend to through cross-attention layers, as one list of keys.

    Attributes:
        start: the first of these tokens.
        end: one past the last; None means to the end of the sequence.
        items: in the order of their keys.
        visible: for each item, the first token that sees it, and how many keys there are up to its
            last one. A token sees the keys of all items that are visible so far.
    """

    start: int
    end: int | None
    items: tuple[MediaItem, ...]
    visible: tuple[tuple[int, int], ...]

    @property
    def keys(self) -> int:
        """Number of keys of all items."""
        return self.visible[-1][1]

    def within(self, start: int, end: int) -> range:
        """Return the tokens in `[start, end)` that attend to the items."""
        return range(max(start, self.start), end if self.end is None else min(end, self.end))
