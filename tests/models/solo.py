"""A `ForwardContext` of one whole sequence, which shares its step with no other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.cache.specs import ChunkedKV, LayerSpec, RecurrentState, SharedKV, WindowKV
from quire.core.media import MediaItem, PlacedMedia
from quire.executor.recurrent_rows import RecurrentLayers, RecurrentRows
from quire.models.base import ForwardContext, LanguageModel, MediaEncoder
from quire.models.media_rows import MediaRows


class SoloStates:
    """The states of one sequence that starts with this step."""

    def __init__(self, spec: RecurrentState, dtype: mx.Dtype) -> None:
        self.written: dict[str, mx.array] = {}
        self._zeros = {
            name: mx.zeros((1, *shape), dtype=mx.float32 if part == "float32" else dtype)
            for name, shape, part in spec.arrays
        }

    @property
    def names(self) -> Collection[str]:
        return self._zeros

    def read(self, name: str) -> mx.array:
        return self._zeros[name]

    def write(self, name: str, value: mx.array) -> None:
        assert value.shape == self._zeros[name].shape
        self.written[name] = value


class SoloStep(RecurrentLayers, ForwardContext):
    """The whole prompt at once, plain attention with an explicit mask from the layer's spec.

    Args:
        media: what an encoder made of the images.
        images: where they are.
        positions: of the tokens, where they are not their indices.
    """

    def __init__(
        self,
        layout: tuple[LayerSpec, ...],
        tokens: list[int],
        media: MediaRows | None = None,
        images: Sequence[PlacedMedia] = (),
        positions: npt.NDArray[np.float32] | None = None,
    ) -> None:
        places = np.arange(len(tokens), dtype=np.int32)
        where = mx.array(places if positions is None else positions)
        super().__init__(media)
        self.tokens, self.positions = mx.array(tokens, dtype=mx.int32), where
        ends = list(range(1, len(tokens) + 1))
        for image in images:
            if image.item.bidirectional:
                ends[image.start : image.end] = [image.end] * image.item.tokens
        self._ends = mx.array(ends)  # of what a row sees where images are seen whole
        self._layout = layout
        self._stored: dict[int, tuple[mx.array, mx.array]] = {}
        self._chosen: dict[int, mx.array] = {}
        self._rows = RecurrentRows([places[None]], self._states)

    @property
    def recurrent(self) -> RecurrentRows:
        return self._rows

    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        chosen_by: int | None = None,
    ) -> mx.array:
        spec = self._layout[layer]
        source = spec.layer if isinstance(spec, SharedKV) else layer
        if k is not None and v is not None:
            assert not isinstance(spec, SharedKV)
            self._stored[layer] = (k, v)
        k, v = self._stored[source]
        places = mx.arange(len(self.tokens))  # not `positions`: a picture's do not grow by one
        distance = places[:, None] - places[None, :]
        visible = distance >= 0
        spec = self._layout[source]
        if isinstance(spec, ChunkedKV):
            visible = visible & (places[:, None] // spec.chunk == places[None, :] // spec.chunk)
        kept = spec.kept
        if kept is not None and kept.bidirectional_media:
            visible = places[None, :] < self._ends[:, None]
        if isinstance(spec, WindowKV):
            visible = visible & (distance < spec.window)
        if chosen_by is not None:
            visible = visible & self._chosen[chosen_by]
        if softcap is not None:
            assert sinks is None
            return _capped_attention(q * scale, k, v, visible, softcap)
        out = mx.fast.scaled_dot_product_attention(
            q.swapaxes(0, 1)[None],
            k.swapaxes(0, 1)[None],
            v.swapaxes(0, 1)[None],
            scale=scale,
            mask=visible,
            sinks=sinks,
        )
        return out[0].swapaxes(0, 1)

    def choose(self, layer: int, q: mx.array, k: mx.array, weights: mx.array, limit: int) -> None:
        """Sorts keys by score and then by place, row by row."""
        scores = mx.einsum("th,ths->ts", weights, mx.maximum(mx.einsum("thd,sd->ths", q, k), 0))
        chosen = np.zeros(scores.shape, bool)
        for row, each in enumerate(np.array(scores)):
            best = sorted(range(row + 1), key=lambda key: (-each[key], key))
            chosen[row, best[:limit]] = True
        self._chosen[layer] = mx.array(chosen)

    def sampled_rows_only(self) -> None:
        """All rows are."""

    def _states(self, layer: int) -> list[SoloStates]:
        spec = self._layout[layer]
        assert isinstance(spec, RecurrentState)
        return [SoloStates(spec, mx.float32)]


def _capped_attention(
    q: mx.array, k: mx.array, v: mx.array, visible: mx.array, softcap: float
) -> mx.array:
    """Return attention spelled out, `[T, heads, head_dim]`, its logits bounded."""
    groups = q.shape[1] // k.shape[1]
    k, v = (mx.repeat(each, groups, axis=1).swapaxes(0, 1) for each in (k, v))
    logits = softcap * mx.tanh(q.swapaxes(0, 1) @ k.swapaxes(-1, -2) / softcap)
    weights = mx.softmax(mx.where(visible, logits, -mx.inf), axis=-1)
    return (weights @ v).swapaxes(0, 1)


def solo_logits(
    model: LanguageModel,
    tokens: list[int],
    images: Sequence[PlacedMedia] = (),
    rows: Sequence[tuple[mx.array, ...]] | None = None,
) -> mx.array:
    """Return logits `[len(tokens), vocab]` of one sequence computed at once.

    Args:
        rows: what an encoder made of each image, `[tokens, hidden]` a level; None asks the model's.
    """
    media = media_rows(model, images, rows, len(tokens)) if images else None
    positions = model.positions(tokens, images)
    return model.logits(model(SoloStep(model.layout, tokens, media, images, positions)))


def picture(rows: int, columns: int, values: int, tokens: int) -> MediaItem:
    """Return an image of so many patches: a slope from patch to patch, some of them inverted."""
    patches = np.arange(rows * columns)[:, None]
    slope = 5 * patches + 3 * np.arange(values)[None] + 11 * (patches // columns)
    pixels = np.where(patches % 7 == 0, 255 - slope % 256, slope % 256).astype(np.uint8)
    return MediaItem("image", pixels.tobytes(), (rows, columns), tokens, b"")


def encoded(encoder: MediaEncoder, item: MediaItem) -> tuple[mx.array, ...]:
    """Return what an encoder makes of an item, `[tokens, hidden]` for each of its levels."""
    return encoder(mx.array(np.frombuffer(item.features, np.uint8)), item.shape)


def image_features(vision: MediaEncoder, image: MediaItem) -> mx.array:
    """Return what an encoder of one level makes of an image, `[tokens, hidden]`."""
    (rows,) = encoded(vision, image)
    return rows


def media_rows(
    model: LanguageModel,
    images: Sequence[PlacedMedia],
    rows: Sequence[tuple[mx.array, ...]] | None,
    count: int,
) -> MediaRows:
    """Return the rows of a whole sequence of `count` tokens that stand for images; `rows` as for
    `solo_logits`."""
    if rows is None:
        rows = [encoded(model.encoders[each.item.kind], each.item) for each in images]
    places = [np.arange(each.start, each.end, dtype=np.int32) for each in images]
    return MediaRows.of(list(zip(places, rows, strict=True)), count)


def greedy_choices(model: LanguageModel, prompt: list[int], answer: list[int]) -> list[int]:
    """Return what the model would choose at each place of `answer`, given what stands before it.

    Equal to `answer` exactly if greedy decoding of `prompt` gives `answer`: by induction, and in
    one pass instead of one a token.
    """
    logits = solo_logits(model, prompt + answer[:-1])[len(prompt) - 1 :]
    choices: list[int] = mx.argmax(logits, axis=-1).tolist()
    return choices


def solo_greedy(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Return greedy continuation, everything computed anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = model(SoloStep(model.layout, tokens))
        tokens.append(int(mx.argmax(model.logits(hidden[-1:])[0]).item()))
    return tokens[len(prompt) :]
