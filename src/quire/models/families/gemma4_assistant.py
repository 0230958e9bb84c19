"""Gemma 4's assistants: small models that draft from the keys and values of a Gemma 4.

An assistant has no keys and values of its own. Its layers read those of the model's last sliding
and last full layer that has any. It goes on from the model's final hidden state of the last token
that the model has read, and from the embedding of the token after it; then from its own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import SharedKV
from quire.core.errors import ModelError
from quire.models.base import ForwardContext, Module
from quire.models.families.gemma4 import DecoderLayer, Gemma4
from quire.models.families.gemma4_arguments import Gemma4Arguments
from quire.models.layers.common import project_logits
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rope import Rope
from quire.models.settings import FULL, SLIDING, Settings

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of `model_type`."""


class _Layers(Module):
    def __init__(self, args: Gemma4Arguments, before: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, index, before) for index in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _Clusters(Module):
    """Tokens in clusters; only tokens of the likeliest clusters are guessed.

    Args:
        best: number of these clusters.
    """

    def __init__(self, hidden: int, clusters: int, vocab: int, best: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(hidden, clusters, bias=False)
        self.token_ordering = mx.zeros(vocab, mx.int32)
        self._best = best
        self._cluster_of: mx.array | None = None

    def masked(self, logits: mx.array, hidden: mx.array) -> mx.array:
        """Return logits `[R, vocab]`, minus infinity outside the likeliest clusters."""
        scores = self.centroids(hidden)  # [R, clusters]
        count = scores.shape[-1]
        if self._cluster_of is None:
            order = self.token_ordering.astype(mx.int32)
            number = mx.repeat(mx.arange(count, dtype=mx.int32), len(order) // count)
            self._cluster_of = mx.put_along_axis(mx.zeros_like(order), order, number, axis=0)
            mx.eval(self._cluster_of)  # a trace of the logits captures what is computed
        best = mx.argpartition(-scores, self._best - 1, axis=-1)[:, : self._best]
        chosen = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), best, mx.array(True), axis=-1)
        return mx.where(chosen[:, self._cluster_of], logits, -mx.inf)


class Assistant(Module):
    """An assistant, named as its checkpoint names it.

    Args:
        before: number of layers in the layout of the model that it drafts for.
        width: hidden size of that model.
    """

    def __init__(self, s: Settings, args: Gemma4Arguments, before: int, width: int) -> None:
        super().__init__()
        self._args = args
        self.model = _Layers(args, before)
        self.pre_projection = nn.Linear(2 * width, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, width, bias=False)
        self.masked_embedding = None
        if s.flag("use_ordered_embeddings", default=False):
            self.masked_embedding = _Clusters(
                args.hidden_size,
                s.integer("num_centroids", default=2048),
                args.vocab_size,
                best=s.integer("centroid_intermediate_top_k", default=32),
            )
        dims = {SLIDING: args.head_dim, FULL: args.global_head_dim}
        self._ropes = [(kind, Rope(dims[kind], rope)) for kind, rope in sorted(args.rope.items())]

    def __call__(
        self, hidden: mx.array, embedding: mx.array, step: ForwardContext, positions: mx.array
    ) -> mx.array:
        """Return rows `[R, hidden]` for `logits` and `further`.

        Args:
            hidden: `[R, width]`, of the rows of `step`, or the states from before.
            embedding: `[R, width]`, of the tokens after these.
            positions: of these tokens.
        """
        x = self.pre_projection(mx.concatenate([embedding, hidden], axis=-1))
        rotations = {kind: rope(positions) for kind, rope in self._ropes}
        for kind, layer in zip(self._args.layer_types, self.model.layers, strict=True):
            x = layer(x, own=None, step=step, rotate=rotations[kind])
        found: mx.array = self.model.norm(x)
        return found

    def logits(self, x: mx.array) -> mx.array:
        """Return logits `[R, vocab]` of the next tokens."""
        logits = project_logits(x, self.model.embed_tokens, head=None)
        return logits if self.masked_embedding is None else self.masked_embedding.masked(logits, x)

    def further(self, x: mx.array) -> mx.array:
        """Return the states `[R, width]` to go on from."""
        states: mx.array = self.post_projection(x)
        return states


def build_assistant(config: Mapping[str, Any], model: Gemma4, folder: Path) -> Assistant:
    """Return the assistant that a `config.json` describes, and let it read the model's keys.

    Raises:
        ModelError: it was made for another model.
    """
    s = Settings(dict(config))
    text = dict(s.nested("text_config").values)
    text.pop("vocab_size_per_layer_input", None)  # 0: the layers have no embeddings of their own
    args = Gemma4Arguments.from_config(text)
    args = replace(args, num_kv_shared_layers=args.num_hidden_layers, attention_k_eq_v=False)
    own, width = model.args, s.integer("backbone_hidden_size", default=1536)
    facts = {
        "backbone_hidden_size": (width, own.hidden_size),
        "vocab_size": (args.vocab_size, own.vocab_size),
        "head_dim": (args.head_dim, own.head_dim),
        "global_head_dim": (args.global_head_dim, own.global_head_dim),
    }
    for name, (ours, theirs) in facts.items():
        if ours != theirs:
            raise ModelError(
                f"speculate: the assistant {folder} is made for another model: its {name} is "
                f"{ours}, the model's {theirs}"
            )
    writing = own.layer_types[: own.first_shared]
    last = {kind: len(writing) - 1 - writing[::-1].index(kind) for kind in set(writing)}
    before = len(model.layout)
    assistant = Assistant(s, args, before, width=width)
    model.lend_keys(tuple(SharedKV(last[kind]) for kind in args.layer_types))
    return assistant


def named(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return an assistant's tensors as its modules take them."""
    kept = {name: array for name, array in weights.items() if not name.startswith("lm_head.")}
    order = "masked_embedding.token_ordering"
    if order in kept:
        kept[order] = kept[order].astype(mx.int32)
    return kept
