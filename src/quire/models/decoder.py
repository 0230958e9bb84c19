"""The decoder built from a `Description`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import LayerSpec
from quire.device.collectives import gathered
from quire.models.base import ForwardContext, Module, named_parameters
from quire.models.decoder_layers import layer_of
from quire.models.description import Description
from quire.models.layers.common import embed, project_logits
from quire.models.layers.rope import Rope
from quire.models.prediction_head import PredictionHead
from quire.models.shares import Cuts, Split, head_rows
from quire.models.stages import LayeredDecoder, LayeredModel
from quire.models.weights.names import Names, translate

log = logging.getLogger("quire.models")


class Decoder(LayeredDecoder):
    """The model without its head, `model.` in most checkpoints."""

    def __init__(self, whole: Description) -> None:
        super().__init__()
        self._multiplier = whole.embedding_multiplier
        self.embed_tokens = nn.Embedding(whole.vocab_size + whole.marks, whole.hidden_size)
        if whole.embedding_norm is not None:
            self.embed_norm = whole.embedding_norm.module(whole.hidden_size)
        if whole.positions:
            self.embed_positions = nn.Embedding(whole.positions, whole.hidden_size)
        self.layers: list[Module] = []
        first = 0
        for layer in whole.layers:
            self.layers.append(layer_of(whole, layer, first))
            first += len(layer.mixers)
        self.norm = whole.norm.module(whole.hidden_size)
        self._hidden, self._residuals = whole.hidden_size, whole.residuals
        if whole.residuals is not None:
            self.hc_head = whole.residuals.head(whole.hidden_size)
        kinds = dict.fromkeys(mixer.rotation for mixer in whole.mixers)
        self._ropes = tuple((kind, Rope(*kind)) for kind in kinds if kind is not None)
        self._captured: tuple[int, ...] = ()
        """Layers whose inputs are part of the output, behind the normalised states."""

    def embedded(self, tokens: mx.array) -> mx.array:
        """Return the first layer's input for tokens: `[T]` -> `[T, hidden]`."""
        x = embed(self.embed_tokens, tokens, self.norm.weight.dtype)
        if "embed_norm" in self:
            x = self.embed_norm(x)
        return x if self._multiplier == 1 else x * self._multiplier

    def whole(self, step: ForwardContext) -> mx.array:
        """Return normalised hidden states `[T, hidden]`, and the captured ones joined to them."""
        states = self.through(self.embed(step), step, range(len(self.layers)))
        y = self.ended(states[-1])
        if not self._captured:
            return y
        return mx.concatenate([y, *(states[each] for each in self._captured)], axis=-1)

    def embed(self, step: ForwardContext) -> mx.array:
        """Return the first layer's input, `[T, hidden]` of each part that rows hold there."""
        x = self.embedded(step.tokens)
        if "embed_positions" in self:
            x = x + embed(self.embed_positions, step.positions, x.dtype)
        if step.media is not None:
            x = step.media.replaced(x)
        if self._residuals is not None and (count := self._residuals.count(0)) > 1:
            x = mx.concatenate([x] * count, axis=-1)
        return self._as_handed_on(x)

    def through(self, x: mx.array, step: ForwardContext, layers: Iterable[int]) -> list[mx.array]:
        """Return the input of each layer, and the last layer's output, `[T, hidden]` each."""
        rotate = {kind: rope(step.positions) for kind, rope in self._ropes}
        states = [x]
        for index in layers:
            x = self.layers[index](x, step, rotate)
            if step.media is not None:
                x = step.media.deepened(x, index)
            states.append(x)
        return states

    def passed(self, x: mx.array, step: ForwardContext, layers: Iterable[int]) -> mx.array:
        if self.held is not None and self._residuals is not None:
            x = x[:, : self._hidden * self._residuals.count(self.held.layers.start)]
        return self._as_handed_on(self.through(x, step, layers)[-1])

    def _as_handed_on(self, x: mx.array) -> mx.array:
        """Return rows in one shape between any layers, if ranks hand them on."""
        if self.held is None or self._residuals is None:
            return x
        width = self._hidden * self._residuals.count(len(self.layers))
        return mx.pad(x, [(0, 0), (0, width - x.shape[-1])])

    def ended(self, x: mx.array) -> mx.array:
        y: mx.array = self.norm(self.hc_head(x) if "hc_head" in self else x)
        return y

    def capture(self, layers: tuple[int, ...]) -> None:
        self._captured = layers

    @property
    def captured(self) -> tuple[int, ...]:
        """The layers that `capture` named."""
        return self._captured


class DecoderModel(LayeredModel):
    """A decoder with its head, built from a description.

    Args:
        names: names and layouts of tensors in the family's checkpoints.
    """

    model: Decoder

    def __init__(self, description: Description, names: Names) -> None:
        super().__init__()
        self.description = description
        self.names = names
        hidden, vocab = description.hidden_size, description.vocab_size
        self.model = Decoder(description)
        rows = head_rows(vocab, description.part)
        self.lm_head = (
            None if description.tied_head else nn.Linear(hidden, rows, bias=description.head_bias)
        )
        self._layout = tuple(mixer.spec for mixer in description.mixers)
        self.heads: list[PredictionHead] = []

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return (*self._layout, *(head.spec for head in self.heads))

    @property
    def own_layout(self) -> tuple[LayerSpec, ...]:
        return self._layout

    def add_heads(self, tensors: Iterable[str]) -> int:
        layer, count = self.description.ahead, self.names.count_heads(tensors)
        if layer is None:
            return 0
        self.names = replace(self.names, heads_read=count)
        self.heads = [
            PredictionHead(self.description, layer, len(self._layout) + number)
            for number in range(count)
        ]
        return count

    def capture(self, layers: tuple[int, ...]) -> None:
        """Join the inputs of some layers to each row's output from now on, for a head that drafts.

        Args:
            layers: indices of layers; their number stands for the last one's output.
        """
        self.model.capture(layers)

    @property
    def captured(self) -> tuple[int, ...]:
        """The layers that `capture` named."""
        return self.model.captured

    def final(self, output: mx.array) -> mx.array:
        return output[:, : self.description.hidden_size] if self.captured else output

    def look_ahead(
        self, hidden: mx.array, following: mx.array, step: ForwardContext, head: int = 0
    ) -> mx.array:
        return self.heads[head](hidden, self.model.embedded(following), step)

    @property
    def vocab_size(self) -> int:
        return self.description.vocab_size

    @property
    def embedded_tokens(self) -> int:
        return self.description.vocab_size + self.description.marks

    def __call__(self, step: ForwardContext) -> mx.array:
        return self.model(step)

    def logits(self, hidden: mx.array) -> mx.array:
        whole, hidden = self.description, self.final(hidden)
        if whole.head_multiplier != 1:
            hidden = hidden * whole.head_multiplier
        table, head = self.model.embed_tokens, self.lm_head
        logits = project_logits(hidden, table, head, softcap=whole.logit_softcap)
        return gathered(logits, whole.part)[:, : whole.vocab_size]

    @property
    def specs_by_layer(self) -> tuple[int, ...]:
        return tuple(len(layer.mixers) for layer in self.description.layers)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        described, cuts = self.description.share(split)
        own = copy(self)  # encoders and all else are whole on each rank
        DecoderModel.__init__(own, described, self.names)
        return own, cuts

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        ready = translate(weights, self.names)
        if self.description.tied_head:
            self._read_head(ready)
        elif "lm_head.weight" not in ready and "model.embed_tokens.weight" in ready:
            log.warning(
                "The checkpoint has no lm_head.weight, so it is of a model that embeds: what it "
                "generates has no meaning."
            )
            self.description, self.lm_head = replace(self.description, tied_head=True), None
        for name, place in named_parameters(self).items():
            if name not in ready and name.endswith(self.names.zero_if_absent):
                log.warning("The checkpoint has no tensor %s; zeros are used instead.", name)
                ready[name] = mx.zeros_like(place)
        return ready

    def _read_head(self, weights: dict[str, mx.array]) -> None:
        """Drop a head that equals the embedding table; keep any other, even if the configuration
        ties them.

        Configurations of several parts often omit that the head is not tied. Transformers reads
        such checkpoints in the same way.
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
