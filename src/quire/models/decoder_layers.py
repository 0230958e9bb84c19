"""The layers of a decoder, by where their norms are."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from quire.device.collectives import summed
from quire.device.device import current_device
from quire.models.base import ForwardContext, Module
from quire.models.description import Description, Layer, NormPlacement, Rotation
from quire.models.layers.attention_residuals import AttentionResiduals, ResidualMixture
from quire.models.layers.rope import Rotate
from quire.models.layers.streams import HyperConnection, Streams

Rotations = Mapping[Rotation, Rotate]
"""Rotations of a step's positions, by kind."""


class DecoderLayer(Module):
    """A layer: blocks that mix tokens, then a feed-forward block; each output is added to its
    input.

    Args:
        first: index into the model's layout of what its first mixer keeps.
    """

    def __init__(self, whole: Description, layer: Layer, first: int) -> None:
        super().__init__()
        self._multiplier = whole.residual_multiplier
        self._by_token = layer.by_token
        self._part = whole.part
        self._mixers = tuple((mixer.attribute, mixer.rotation) for mixer in layer.mixers)
        for number, mixer in enumerate(layer.mixers):
            self[mixer.attribute] = mixer.module(whole.hidden_size, first + number)
        if layer.feed_forward is not None:
            self.mlp = layer.feed_forward.module(whole.hidden_size)
        norm = whole.block_norm or whole.norm
        for name in self._norms(layer):
            self[name] = norm.module(whole.hidden_size)

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        mixes, feeds = bool(layer.mixers), layer.feed_forward is not None
        return ("input_layernorm",) * mixes + ("post_attention_layernorm",) * feeds

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        if "input_layernorm" in self:
            x = self._add(x, self._mix(self.input_layernorm(x), step, rotate))
        if "mlp" in self:
            x = self._add(x, self._feed(self.post_attention_layernorm(x), step))
        return x

    def _mix(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        """Return what the layer mixes from all ranks' heads."""
        return summed(self._own_mix(x, step, rotate), self._part)

    def _feed(self, x: mx.array, step: ForwardContext) -> mx.array:
        return summed(self._own_feed(x, step), self._part)

    def _own_mix(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        (name, kind), *others = self._mixers
        y: mx.array = self[name](x, step, None if kind is None else rotate[kind])
        for name, kind in others:
            y = y + self[name](x, step, None if kind is None else rotate[kind])
        return y

    def _own_feed(self, x: mx.array, step: ForwardContext) -> mx.array:
        y: mx.array = self.mlp(x, step.tokens) if self._by_token else self.mlp(x)
        return y

    def _add(self, x: mx.array, block: mx.array) -> mx.array:
        return x + (block if self._multiplier == 1 else block * self._multiplier)


class PostNormLayer(DecoderLayer):
    """A layer with norms after the blocks."""

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        return ("post_attention_layernorm", "post_feedforward_layernorm")

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        x = self._add(x, self.post_attention_layernorm(self._mix(x, step, rotate)))
        return self._add(x, self.post_feedforward_layernorm(self._feed(x, step)))


class AddedNormLayer(DecoderLayer):
    """A layer with norms of the sums of each block and its input (arXiv:1706.03762)."""

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        x = self.input_layernorm(self._add(x, self._mix(x, step, rotate)))
        y: mx.array = self.post_attention_layernorm(self._add(x, self._feed(x, step)))
        return y


class SecondNormLayer(DecoderLayer):
    """A layer whose first block gets its input as it is, because it is normalised already."""

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        return ("post_attention_layernorm",)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        x = self._add(x, self._mix(x, step, rotate))
        return self._add(x, self._feed(self.post_attention_layernorm(x), step))


class SandwichLayer(DecoderLayer):
    """A layer with norms before and after the blocks."""

    def __init__(self, whole: Description, layer: Layer, first: int) -> None:
        super().__init__(whole, layer, first)
        if whole.after_norm is not None:
            for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
                self[name] = whole.after_norm.module(whole.hidden_size)

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        y = self._mix(self.input_layernorm(x), step, rotate)
        x = self._add(x, self.post_attention_layernorm(y))
        y = self._feed(self.pre_feedforward_layernorm(x), step)
        return self._add(x, self.post_feedforward_layernorm(y))


class ParallelLayer(DecoderLayer):
    """A layer whose blocks both read the same normalised rows."""

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        return ("input_layernorm",)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        y = self.input_layernorm(x)
        blocks = self._own_mix(y, step, rotate) + self._own_feed(y, step)
        return self._add(x, summed(blocks, self._part))


class BesideLayer(DecoderLayer):
    """A layer whose blocks both read the same rows, each through its own norm."""

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        mixed = self._own_mix(self.input_layernorm(x), step, rotate)
        fed = self._own_feed(self.post_attention_layernorm(x), step)
        return self._add(x, summed(mixed + fed, self._part))


class ShortcutLayer(DecoderLayer):
    """Two layers with one mixture of experts (arXiv:2509.01322).

    The experts read what the first layer's dense block reads. Their output is added to the second
    layer's, so that they can be computed beside it.
    """

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        first = ("input_layernorm", "post_attention_layernorm")
        return (*first, *(f"second_{name}" for name in first))

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        (name, kind), (second, second_kind) = self._mixers
        mixed = self[name](self.input_layernorm(x), step, kind and rotate[kind])
        x = self._add(x, summed(mixed, self._part))
        y = self.post_attention_layernorm(x)
        experts = self.mlp.mixture(y)
        x = self._add(x, summed(self.mlp.first(y), self._part))
        mixed = self[second](
            self.second_input_layernorm(x), step, second_kind and rotate[second_kind]
        )
        x = self._add(x, summed(mixed, self._part))
        fed = self.mlp.second(self.second_post_attention_layernorm(x)) + experts
        return self._add(x, summed(fed, self._part))


class StreamsLayer(DecoderLayer):
    """A layer between several residual streams, with norms before each block."""

    def __init__(self, whole: Description, layer: Layer, first: int) -> None:
        super().__init__(whole, layer, first)
        assert isinstance(whole.residuals, Streams), "the layers of streams"
        self.attn_hc = HyperConnection(whole.residuals, whole.hidden_size)
        self.ffn_hc = HyperConnection(whole.residuals, whole.hidden_size)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        """`[T, streams * hidden]` -> the same."""
        y, weights = self.attn_hc.read(x)
        x = self.attn_hc.written(x, self._mix(self.input_layernorm(y), step, rotate), weights)
        y, weights = self.ffn_hc.read(x)
        return self.ffn_hc.written(x, self._feed(self.post_attention_layernorm(y), step), weights)


class MixingLayer(DecoderLayer):
    """A layer that adds to the last of several sums, with norms before each block."""

    def __init__(self, whole: Description, layer: Layer, first: int) -> None:
        super().__init__(whole, layer, first)
        assert isinstance(whole.residuals, AttentionResiduals), "the layers of sums"
        self.self_attention_res = ResidualMixture(whole.residuals, whole.hidden_size)
        self.mlp_res = ResidualMixture(whole.residuals, whole.hidden_size)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        """`[T, sums * hidden]` -> the same, or with another sum, see `_mixed`."""
        y = self.input_layernorm(self.self_attention_res(x))
        x = self._mixed(x, self._mix(y, step, rotate))
        y = self.post_attention_layernorm(self.mlp_res(x))
        return self.mlp_res.added(x, self._feed(y, step))

    def _mixed(self, x: mx.array, y: mx.array) -> mx.array:
        """Return the sums `x` with the attention's output `y`."""
        return self.self_attention_res.added(x, y)


class StartingLayer(MixingLayer):
    """A mixing layer with which another sum starts."""

    def _mixed(self, x: mx.array, y: mx.array) -> mx.array:
        return mx.concatenate([x, y], axis=-1)


class GatedLayer(DecoderLayer):
    """A cross-attention layer inserted into a text decoder (arXiv:2407.21783, section 7).

    Gates start closed. Rows that attend to no media pass unchanged.
    """

    def __init__(self, whole: Description, layer: Layer, first: int) -> None:
        super().__init__(whole, layer, first)
        self.cross_attn_attn_gate = mx.zeros(1)
        self.cross_attn_mlp_gate = mx.zeros(1)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        if step.cross is None:
            return x
        y = self._mix(self.input_layernorm(x), step, rotate)
        y = x + current_device().operations.tanh(self.cross_attn_attn_gate) * y
        fed = self._feed(self.post_attention_layernorm(y), step)
        y = y + current_device().operations.tanh(self.cross_attn_mlp_gate) * fed
        attending = step.cross.attending
        return y if attending is None else mx.where(attending, y, x)


_LAYERS: dict[NormPlacement, type[DecoderLayer]] = {
    NormPlacement.PRE: DecoderLayer,
    NormPlacement.POST: PostNormLayer,
    NormPlacement.ADDED: AddedNormLayer,
    NormPlacement.SECOND: SecondNormLayer,
    NormPlacement.SANDWICH: SandwichLayer,
    NormPlacement.PARALLEL: ParallelLayer,
    NormPlacement.BESIDE: BesideLayer,
    NormPlacement.SHORTCUT: ShortcutLayer,
    NormPlacement.STREAMS: StreamsLayer,
    NormPlacement.MIXING: MixingLayer,
    NormPlacement.STARTING: StartingLayer,
    NormPlacement.GATED: GatedLayer,
}


def layer_of(whole: Description, layer: Layer, first: int) -> DecoderLayer:
    """Return the module of a layer; for `first` see `DecoderLayer`."""
    return _LAYERS[layer.placement or whole.placement](whole, layer, first)
