"""Splits a model over ranks: each has a part of the heads, of the MLPs' columns and of the head's
rows.

The description is split, so the same modules compute a part; weights are cut by their names within
a layer. The outputs of all ranks' blocks are summed, see `Description.ranks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from quire.core.errors import ModelError
from quire.device.ranks import Part
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description, FeedForward, Layer, Mixer
from quire.models.layers.attention import Attention, Over
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture

_HEADS = ("q_proj", "g_proj", "q_norm", "sinks")
"""Modules split by query heads."""
_KV_HEADS = ("k_proj", "v_proj", "k_norm")
"""Modules split by KV heads. If there are fewer KV heads than ranks, several ranks have the same
one.
"""
_WIDTH = ("gate_proj", "up_proj")
"""Modules split by the inner width of an MLP or of each expert."""
_SUMMED = ("o_proj", "down_proj")
"""Modules split by their inputs: the ranks' products are summed, and the first rank adds
the bias.
"""
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")
_KINDS = ("weight", "scales", "biases", "bias")
_HEAD, _TABLE = "lm_head.", "model.embed_tokens."


def split_model(model: LanguageModel, part: Part) -> LanguageModel:
    """Return the model with a rank's part of each layer, without weights.

    Raises:
        ModelError: a layer cannot be split over this number of ranks.
    """
    if not isinstance(model, DecoderModel) or type(model) is not DecoderModel:
        raise ModelError("--tensor-parallel: models of this family cannot be split yet")
    whole = model.description
    layers = tuple(_layer(each, part) for each in whole.layers)
    rows = -(-whole.vocab_size // part.size)
    described = replace(whole, layers=layers, tied_head=False, ranks=part.size, head_rows=rows)
    return DecoderModel(described, model.names)


def _layer(layer: Layer, part: Part) -> Layer:
    mixers = tuple(_mixer(each, part.size) for each in layer.mixers)
    fed = layer.feed_forward
    return replace(layer, mixers=mixers, feed_forward=None if fed is None else _fed(fed, part.size))


def _mixer(kind: Mixer, size: int) -> Mixer:
    if type(kind) is not Attention:
        raise ModelError(f"--tensor-parallel: {type(kind).__name__} cannot be split yet")
    if kind.qk_norm is not None and kind.qk_norm.over is Over.ALL_HEADS:
        raise ModelError("--tensor-parallel: norms over all heads at once cannot be split")
    heads = _share(kind.heads, size, "attention heads")
    if kind.kv_heads < size and size % kind.kv_heads == 0:
        return replace(kind, heads=heads, kv_heads=1)
    return replace(kind, heads=heads, kv_heads=_share(kind.kv_heads, size, "heads of keys"))


def _fed(kind: FeedForward, size: int) -> FeedForward:
    if type(kind) is MLP:
        return replace(kind, width=_share(kind.width, size, "values of an MLP"))
    if type(kind) is Mixture and not kind.latent_dim:
        width = _share(kind.width, size, "values of an expert")
        shared = kind.shared_width and _share(kind.shared_width, size, "values of an expert")
        return replace(kind, width=width, shared_width=shared)
    raise ModelError(f"--tensor-parallel: {type(kind).__name__} cannot be split yet")


def _share(count: int, size: int, what: str) -> int:
    if count % size:
        raise ModelError(
            f"--tensor-parallel {size}: the model has {count} {what}, not a multiple of {size}"
        )
    return count // size


def cut(weights: dict[str, mx.array], whole: LanguageModel, part: Part) -> dict[str, mx.array]:
    """Return a rank's part of a whole model's weights, as lazy arrays."""
    assert isinstance(whole, DecoderModel)
    ready = {
        name: array if name.startswith(_HEAD) else _cut(name, array, whole.description, part)
        for name, array in weights.items()
    }
    if not any(name.startswith(_HEAD) for name in weights):  # the head is the table
        tied = {name: each for name, each in weights.items() if name.startswith(_TABLE)}
        ready |= {name.replace(_TABLE, _HEAD): each for name, each in tied.items()}
    heads = {name: _rows(each, part) for name, each in ready.items() if name.startswith(_HEAD)}
    return ready | heads


def _rows(array: mx.array, part: Part) -> mx.array:
    """Return a rank's rows of the head; zeros fill up the last rank's."""
    each = -(-array.shape[0] // part.size)
    own = array[part.rank * each : (part.rank + 1) * each]
    missing = each - own.shape[0]
    return mx.pad(own, [(0, missing), *[(0, 0)] * (own.ndim - 1)]) if missing else own


def _cut(name: str, array: mx.array, whole: Description, part: Part) -> mx.array:
    found = _LAYER.fullmatch(name)
    if found is None:
        return array
    layer, (*_, place, kind) = whole.layers[int(found[1])], name.split(".")
    if kind not in _KINDS:
        place, kind = kind, ""
    if place in _SUMMED:
        if kind != "bias":
            return _slice(array, -1, array.shape[-1], part, name)
        return array if part.rank == 0 else mx.zeros_like(array)
    # Rows: of a matrix or of its packed parts the last axis but one, of all else the only one.
    axis = -2 if kind in ("weight", "scales", "biases") and array.ndim > 1 else -1
    if place in _WIDTH:
        return _slice(array, axis, array.shape[axis], part, name)
    (mixer,) = layer.mixers
    assert isinstance(mixer, Attention)
    by_head = place.endswith("_proj") or place == "sinks" or array.ndim > 1
    if place in _HEADS and by_head:
        return _slice(array, axis, mixer.heads, part, name)
    if place in _KV_HEADS and by_head:
        return _slice(array, axis, mixer.kv_heads, part, name)
    return array


def _slice(array: mx.array, axis: int, count: int, part: Part, name: str) -> mx.array:
    """Return a rank's share of `count` equal pieces along an axis."""
    if array.shape[axis] % count or (count > part.size and count % part.size):
        raise ModelError(f"--tensor-parallel {part.size}: {name} cannot be cut into equal parts")
    each, own = array.shape[axis] // count, part.within(count)
    first, last = own.start * each, own.stop * each
    cutting: Callable[[mx.array], mx.array] = (
        (lambda x: x[..., first:last]) if axis == -1 else (lambda x: x[..., first:last, :])
    )
    return cutting(array)
