"""Encoders of text, whose tokens see each other in both directions (BERT, arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import LayerSpec
from quire.core.errors import ModelError
from quire.models.base import ForwardContext, LanguageModel, Module
from quire.models.decoder_layers import DecoderLayer, layer_of
from quire.models.description import Description
from quire.models.layers.common import ACTIVATIONS, embed
from quire.models.layers.rope import Rope
from quire.models.shares import Cuts, Split
from quire.models.weights.names import Weights

_ACTIVATIONS = ACTIVATIONS | {"tanh": mx.tanh}


@dataclass(frozen=True)
class ClassificationHead:
    """Description of a head that classifies a text, or a pair of texts.

    Attributes:
        labels: number of its logits.
        activation: behind its first product.
        bias: whether the first product has a bias.
        normed: whether a norm follows the activation.
        pooling: what it reads: the first token's hidden state, or the mean of all.
    """

    labels: int
    activation: str
    bias: bool = True
    normed: bool = False
    pooling: Literal["cls", "mean"] = "cls"


@dataclass(frozen=True)
class TextEncoderDescription:
    """Description of a text encoder.

    Attributes:
        body: its layers, whose mixers are bidirectional; `positions` is the number of rows of a
            table of learned positions.
        token_types: rows of the table of token types; 0 means none.
        final_norm: whether the last layer's output is normalised.
    """

    body: Description
    token_types: int
    final_norm: bool
    head: ClassificationHead | None


class Encoder(Module):
    """The encoder without its head."""

    def __init__(self, whole: TextEncoderDescription) -> None:
        super().__init__()
        body = whole.body
        self.embed_tokens = nn.Embedding(body.vocab_size, body.hidden_size)
        if body.positions:
            self.embed_positions = nn.Embedding(body.positions, body.hidden_size)
        if whole.token_types:
            self.embed_types = nn.Embedding(whole.token_types, body.hidden_size)
        self.embed_norm = body.norm.module(body.hidden_size)
        self.layers: list[DecoderLayer] = [
            layer_of(body, layer, number) for number, layer in enumerate(body.layers)
        ]
        if whole.final_norm:
            self.norm = body.norm.module(body.hidden_size)
        kinds = dict.fromkeys(mixer.rotation for mixer in body.mixers)
        self._ropes = tuple((kind, Rope(*kind)) for kind in kinds if kind is not None)

    def __call__(self, step: ForwardContext) -> mx.array:
        """Return hidden states `[T, hidden]`."""
        dtype = self.embed_norm.weight.dtype
        positions, types = step.positions, None
        if positions.ndim > 1:
            positions, types = positions.astype(mx.int32)
        x = embed(self.embed_tokens, step.tokens, dtype)
        if "embed_types" in self:
            kinds = mx.zeros_like(positions) if types is None else types
            x = x + embed(self.embed_types, kinds, dtype)
        if "embed_positions" in self:
            x = x + embed(self.embed_positions, positions, dtype)
        x = self.embed_norm(x)
        rotate = {kind: rope(positions) for kind, rope in self._ropes}
        for layer in self.layers:
            x = layer(x, step, rotate)
        return self.norm(x) if "norm" in self else x


class Classifier(Module):
    """Computes a `ClassificationHead`."""

    def __init__(self, kind: ClassificationHead, whole: Description) -> None:
        super().__init__()
        hidden = whole.hidden_size
        self._kind = kind
        self.dense = nn.Linear(hidden, hidden, bias=kind.bias)
        if kind.normed:
            self.norm = whole.norm.module(hidden)
        self.out_proj = nn.Linear(hidden, kind.labels, bias=True)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return logits in float32: a text's rows `[T, hidden]` -> `[labels]`."""
        x = hidden[:1] if self._kind.pooling == "cls" else hidden.mean(axis=0, keepdims=True)
        x = _ACTIVATIONS[self._kind.activation](self.dense(x))
        if "norm" in self:
            x = self.norm(x)
        y: mx.array = self.out_proj(x).squeeze(0).astype(mx.float32)
        return y


class TextEncoder(LanguageModel):
    """An encoder with its classification head, if it has one.

    Args:
        named: returns a checkpoint's tensors by the names of this module.
    """

    typed_by = "model.embed_norm.weight"

    def __init__(
        self, description: TextEncoderDescription, named: Callable[[Weights], Weights]
    ) -> None:
        super().__init__()
        self.description = description
        self._named = named
        self.model = Encoder(description)
        head = description.head
        self.classifier = None if head is None else Classifier(head, description.body)
        self._layout = tuple(mixer.spec for mixer in description.body.mixers)

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self.description.body.vocab_size

    @property
    def token_types(self) -> int:
        count = self.description.token_types
        return count if count > 1 else 0

    @property
    def position_axes(self) -> int:
        return 2 if self.token_types else 0

    @property
    def labels(self) -> int:
        head = self.description.head
        return 0 if head is None else head.labels

    def classify(self, hidden: mx.array) -> mx.array:
        assert self.classifier is not None, "the model has no classification head"
        return self.classifier(hidden)

    def __call__(self, step: ForwardContext) -> mx.array:
        return self.model(step)

    def logits(self, hidden: mx.array) -> mx.array:
        raise NotImplementedError("an encoder predicts no next token")

    def share(self, split: Split) -> tuple[Self, Cuts]:
        raise ModelError("encoders cannot be split over devices; serve several replicas instead")

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return self._named(weights)
