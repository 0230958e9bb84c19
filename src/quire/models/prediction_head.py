"""A checkpoint's own head for multi-token prediction: one more layer, behind the last one.

From the final hidden state of a token and the embedding of the token that follows it, the layer
computes the hidden state of the latter, from which the head of the model predicts the token after
(DeepSeek-V3, arXiv:2412.19437, section 2.2). Qwen3-Next, Qwen3.5 and GLM have the same form. Its
keys and values lie in the same blocks as the model's, at the index of the first of both tokens.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import LayerSpec
from quire.models.base import ForwardContext, Module
from quire.models.decoder_layers import layer_of
from quire.models.description import Description, Layer
from quire.models.layers.rope import Rope


class PredictionHead(Module):
    """The layer, and what joins its two inputs.

    Args:
        whole: the model's description.
        layer: the layer, which mixes tokens once.
        index: index into the model's layout of what it keeps.
    """

    def __init__(self, whole: Description, layer: Layer, index: int) -> None:
        super().__init__()
        hidden = whole.hidden_size
        self.embedding_norm = whole.norm.module(hidden)
        self.hidden_norm = whole.norm.module(hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = layer_of(whole, layer, index)
        self.norm = whole.norm.module(hidden)
        (mixer,) = layer.mixers
        self._spec = mixer.spec
        kinds = [] if mixer.rotation is None else [mixer.rotation]
        self._ropes = tuple((kind, Rope(*kind)) for kind in kinds)

    @property
    def spec(self) -> LayerSpec:
        """The state that it keeps."""
        return self._spec

    def __call__(self, hidden: mx.array, following: mx.array, step: ForwardContext) -> mx.array:
        """Return the hidden states of the following tokens, `[T, hidden]`, ready for the logits.

        Args:
            hidden: `[T, hidden]`, the model's final states of a step's rows.
            following: `[T, hidden]`, embeddings of the tokens after these rows' tokens.
        """
        joined = mx.concatenate([self.embedding_norm(following), self.hidden_norm(hidden)], axis=-1)
        rotate = {kind: rope(step.positions) for kind, rope in self._ropes}
        y: mx.array = self.norm(self.layer(self.fc(joined), step, rotate))
        return y
