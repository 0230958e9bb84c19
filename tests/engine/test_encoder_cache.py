"""Media of any kind becomes rows: an encoder of two levels, for a kind that no model here has."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from quire.core.errors import RequestError
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem, MediaKey, PlacedMedia
from quire.core.request import Request
from quire.device.device import current_device
from quire.engine.request_media import RequestMedia
from quire.executor.encoder_cache import EncoderCache
from quire.models.base import MediaEncoder
from quire.scheduler.plan import EncoderWork
from tests.engine.rows import scheduled


class Waves(MediaEncoder):
    """Two float32 numbers a frame become a row of each of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, ...]] = []

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return shape[0] * 8

    def rows(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        self.asked.append(shape)
        frames = features.view(mx.float32).reshape(shape[0], 2)
        return frames, frames * 10


FEATURES: dict[MediaKey, bytes] = {}
NUMBERS = count(1)


def sound(frames: int, kind: str = "audio") -> MediaItem:
    values: Any = mx.arange(2 * frames, dtype=mx.float32)
    item = MediaItem.of(kind, bytes(memoryview(values)), (frames,), frames, bidirectional=False)
    FEATURES[item.key] = item.features
    return item


def whole(item: MediaItem) -> EncoderWork:
    """Return all of an item's encoding, which is one piece."""
    return EncoderWork(item, 0, 1, item.tokens, completes=True, group=next(NUMBERS))


def rows_of(encoders: EncoderCache, start: int, rows: int) -> tuple[list[int], Any, Any]:
    media = (PlacedMedia(3, sound(4)),)
    row = scheduled("a", start, rows, [[1, 2, 3]], KVFormat(), images=media)
    found = encoders.rows([scheduled("b", 5, 1, [[4, 5]], KVFormat()), row])
    assert found is not None
    placed = np.array(found.placed)[:, 0]
    values, deeper = (np.array(level)[placed].tolist() for level in found.levels)
    return np.flatnonzero(placed).tolist(), values, deeper


class Plain(Waves):
    """Waves whose rows have the first level alone."""

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        return super().__call__(features, shape)[:1]


def test_items_of_different_levels_share_a_step() -> None:
    encoders = EncoderCache({"audio": Plain(), "waves": Waves()}, FEATURES.__getitem__)
    media = PlacedMedia(1, sound(2)), PlacedMedia(4, sound(2, "waves"))
    encoders.advance([whole(each.item) for each in media])
    found = encoders.rows([scheduled("a", 0, 8, [[1, 2]], KVFormat(), images=media)])
    assert found is not None
    assert np.flatnonzero(np.array(found.placed)).tolist() == [1, 2, 4, 5]
    deepened = found.deepened(mx.zeros((8, 2)), 0)
    assert deepened.tolist() == [[0, 0]] * 4 + [[0, 10], [20, 30]] + [[0, 0]] * 2
    assert found.deepened(mx.zeros((8, 2)), 1).sum().item() == 0


def test_each_level_is_cut_to_the_rows_of_the_step() -> None:
    waves = Waves()
    encoders = EncoderCache({"audio": waves}, FEATURES.__getitem__)
    encoders.advance([whole(sound(4))])
    assert rows_of(encoders, 0, 5) == ([4, 5], [[0, 1], [2, 3]], [[0, 10], [20, 30]])
    assert rows_of(encoders, 5, 4) == ([1, 2], [[4, 5], [6, 7]], [[40, 50], [60, 70]])
    assert waves.asked == [(4,)]


def test_text_has_no_rows() -> None:
    assert (
        EncoderCache({}, FEATURES.__getitem__).rows([scheduled("a", 0, 3, [[1]], KVFormat())])
        is None
    )


def test_only_items_whose_rows_see_each_other_are_ranges() -> None:
    heard, seen = PlacedMedia(1, sound(2)), PlacedMedia(4, replace(sound(3), bidirectional=True))
    row = scheduled("a", 0, 8, [[1, 2]], KVFormat(), images=(heard, seen))
    assert row.bidirectional == ((4, 7),)


def test_items_of_different_kinds_differ() -> None:
    assert sound(4).digest != sound(4, "video").digest
    assert sound(4) == sound(4)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (sound(4, "image"), "takes no image"),
        (replace(sound(4), tokens=5), "becomes 4 tokens"),
        (replace(sound(4), features=b""), "32 bytes"),
    ],
)
def test_what_no_encoder_takes_is_refused(item: MediaItem, said: str) -> None:
    media = RequestMedia({"audio": Waves()})
    with pytest.raises(RequestError, match=said):
        media.check(Request("a", (1,) * 9, media=(PlacedMedia(1, item),)))
    media.check(Request("a", (1,) * 9, media=(PlacedMedia(1, sound(4)),)))


class Several(Waves):
    """Takes several items at once."""

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        self.asked.append(shape)
        frames = features.view(mx.float32).reshape(-1, 2)
        return frames, frames * 10


def test_items_of_a_group_are_encoded_by_one_call() -> None:
    waves = Several()
    encoders = EncoderCache({"waves": waves}, FEATURES.__getitem__)
    items = [sound(2, "waves"), replace(sound(2, "waves"), digest=b"other")]
    FEATURES[items[1].key] = bytes(memoryview(cast("Any", mx.arange(8, 12, dtype=mx.float32))))
    works = [EncoderWork(each, 0, 1, 2, completes=True, group=1) for each in items]
    encoders.advance(works)
    assert waves.asked == [(2,)]
    assert encoders.sizes(works) == {item.key: 32 for item in items}
    encoders.forget([items[0].key])
    media = (PlacedMedia(1, items[1]),)
    found = encoders.rows([scheduled("a", 0, 8, [[1, 2]], KVFormat(), images=media)])
    assert found is not None
    assert np.array(found.levels[0])[1:3].tolist() == [[8, 9], [10, 11]]


@pytest.mark.parametrize(("fuses", "rows", "most"), [(True, 2, 4), (True, 4000, 2), (False, 2, 1)])
def test_few_items_are_encoded_together_where_they_are_large(
    fuses: bool, rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Together(Several):
        takes_several = True

    monkeypatch.setattr(current_device(), "fuses", fuses)
    request = Request("a", (1,) * rows, media=(PlacedMedia(0, sound(rows, "waves")),))
    (pieces,) = RequestMedia({"waves": Together()}).pieces(request).values()
    assert pieces.together == most
