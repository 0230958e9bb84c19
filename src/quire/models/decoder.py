"""The decoder that a `Description` describes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import LayerSpec
from quire.device.ranks import gathered, summed
from quire.models.base import ForwardContext, LanguageModel, Module, named_parameters
from quire.models.description import Description, Layer, NormPlacement, Rotation
from quire.models.layers.common import embed, project_logits
from quire.models.layers.rope import Rope, Rotate
from quire.models.weights.names import Names, translate

log = logging.getLogger("quire.models")

Rotations = Mapping[Rotation, Rotate]
"""Rotations of a step, by kind."""


class DecoderLayer(Module):
    """Blocks that mix tokens and one that does not, each added to what comes in.

    Args:
        first: index into the model's layout of what its first mixer keeps.
    """

    def __init__(self, whole: Description, layer: Layer, first: int) -> None:
        super().__init__()
        self._multiplier = whole.residual_multiplier
        self._by_token = layer.by_token
        self._split = whole.ranks > 1
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
        (name, kind), *others = self._mixers
        y: mx.array = self[name](x, step, None if kind is None else rotate[kind])
        for name, kind in others:
            y = y + self[name](x, step, None if kind is None else rotate[kind])
        return summed(y) if self._split else y

    def _feed(self, x: mx.array, step: ForwardContext) -> mx.array:
        y: mx.array = self.mlp(x, step.tokens) if self._by_token else self.mlp(x)
        return summed(y) if self._split else y

    def _add(self, x: mx.array, block: mx.array) -> mx.array:
        return x + (block if self._multiplier == 1 else block * self._multiplier)


class PostNormLayer(DecoderLayer):
    """Norms after the blocks."""

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        return ("post_attention_layernorm", "post_feedforward_layernorm")

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        x = self._add(x, self.post_attention_layernorm(self._mix(x, step, rotate)))
        return self._add(x, self.post_feedforward_layernorm(self._feed(x, step)))


class SandwichLayer(DecoderLayer):
    """Norms before and after the blocks."""

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
    """Both blocks read the same normalised rows."""

    @staticmethod
    def _norms(layer: Layer) -> tuple[str, ...]:
        return ("input_layernorm",)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        y = self.input_layernorm(x)
        return self._add(x, self._mix(y, step, rotate) + self._feed(y, step))


class BesideLayer(DecoderLayer):
    """Both blocks read the same rows, each by its own norm."""

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        mixed = self._mix(self.input_layernorm(x), step, rotate)
        return self._add(x, mixed + self._feed(self.post_attention_layernorm(x), step))


class GatedLayer(DecoderLayer):
    """Cross-attention beside a decoder that was there before (arXiv:2407.21783, section 7).

    Gates begin closed. Rows that attend to no media pass unchanged.
    """

    def __init__(self, whole: Description, layer: Layer, first: int) -> None:
        super().__init__(whole, layer, first)
        self.cross_attn_attn_gate = mx.zeros(1)
        self.cross_attn_mlp_gate = mx.zeros(1)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotations) -> mx.array:
        if step.cross is None:
            return x
        y = self._mix(self.input_layernorm(x), step, rotate)
        y = x + mx.tanh(self.cross_attn_attn_gate) * y
        fed = self.mlp(self.post_attention_layernorm(y))
        y = y + mx.tanh(self.cross_attn_mlp_gate) * fed
        attending = step.cross.attending
        return y if attending is None else mx.where(attending, y, x)


_LAYERS: dict[NormPlacement, type[DecoderLayer]] = {
    NormPlacement.PRE: DecoderLayer,
    NormPlacement.POST: PostNormLayer,
    NormPlacement.SANDWICH: SandwichLayer,
    NormPlacement.PARALLEL: ParallelLayer,
    NormPlacement.BESIDE: BesideLayer,
    NormPlacement.GATED: GatedLayer,
}


class Decoder(Module):
    """Everything but the head, named as most checkpoints name it: `model.`"""

    def __init__(self, whole: Description) -> None:
        super().__init__()
        self._multiplier = whole.embedding_multiplier
        self.embed_tokens = nn.Embedding(whole.vocab_size + whole.marks, whole.hidden_size)
        self.layers: list[DecoderLayer] = []
        first = 0
        for layer in whole.layers:
            self.layers.append(_LAYERS[layer.placement or whole.placement](whole, layer, first))
            first += len(layer.mixers)
        self.norm = whole.norm.module(whole.hidden_size)
        kinds = dict.fromkeys(mixer.rotation for mixer in whole.mixers)
        self._ropes = tuple((kind, Rope(*kind)) for kind in kinds if kind is not None)

    def __call__(self, step: ForwardContext) -> mx.array:
        """Normalised hidden states `[T, hidden]`."""
        x = embed(self.embed_tokens, step.tokens, self.norm.weight.dtype)
        if self._multiplier != 1:
            x = x * self._multiplier
        if step.media is not None:
            x = step.media.placed(x)
        rotate = {kind: rope(step.positions) for kind, rope in self._ropes}
        for index, layer in enumerate(self.layers):
            x = layer(x, step, rotate)
            if step.media is not None:
                x = step.media.deepened(x, index)
        y: mx.array = self.norm(x)
        return y


class DecoderModel(LanguageModel):
    """A described decoder with its head.

    Args:
        names: how the family's checkpoints name and lay out the tensors.
    """

    def __init__(self, description: Description, names: Names) -> None:
        super().__init__()
        self.description = description
        self.names = names
        hidden, vocab = description.hidden_size, description.vocab_size
        self.model = Decoder(description)
        rows = description.head_rows or vocab
        self.lm_head = (
            None if description.tied_head else nn.Linear(hidden, rows, bias=description.head_bias)
        )
        self._layout = tuple(mixer.spec for mixer in description.mixers)

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self.description.vocab_size

    @property
    def embedded_tokens(self) -> int:
        return self.description.vocab_size + self.description.marks

    def __call__(self, step: ForwardContext) -> mx.array:
        return self.model(step)

    def logits(self, hidden: mx.array) -> mx.array:
        whole = self.description
        if whole.head_multiplier != 1:
            hidden = hidden * whole.head_multiplier
        table, head = self.model.embed_tokens, self.lm_head
        logits = project_logits(hidden, table, head, whole.logit_softcap)
        return logits if whole.ranks == 1 else gathered(logits)[:, : whole.vocab_size]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        ready = translate(weights, self.names)
        if self.description.tied_head:
            self._read_head(ready)
        for name, place in named_parameters(self).items():
            if name not in ready and name.endswith(self.names.zero_if_absent):
                log.warning("the checkpoint has no %s; zeros are used, as in its conversion", name)
                ready[name] = mx.zeros_like(place)
        return ready

    def _read_head(self, weights: dict[str, mx.array]) -> None:
        """Drops a head that is the embedding table; keeps another, whatever the configuration says.

        Configurations of several parts often leave out that the head is not tied. Transformers
        reads such checkpoints so, too.
        """
        head, table = "lm_head.", "model.embed_tokens."
        own = {name: weights.pop(name) for name in list(weights) if name.startswith(head)}
        tied = {
            name.replace(table, head): each
            for name, each in weights.items()
            if name.startswith(table)
        }
        same = own.keys() <= tied.keys() and all(
            mx.array_equal(each, tied[name]).item() for name, each in own.items()
        )
        if not same:
            log.warning(
                "config.json ties the head to the embedding table: the checkpoint's differs"
            )
            whole = self.description
            self.lm_head = nn.Linear(
                whole.hidden_size, whole.vocab_size, bias="lm_head.bias" in own
            )
            weights.update(own)
