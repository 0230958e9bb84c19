"""EAGLE-3 heads (arXiv:2503.01840): a small decoder that drafts from hidden states of a model.

Three hidden states of a token, from layers near the first, in the middle and near the last, are
joined and projected. With the embedding of the token after it, one layer computes the head's own
state, from which the token after that is guessed; then from its own state and the guess. The head
guesses from a vocabulary of its own, a part of the model's.

Two layouts are published: those of SGLang's SpecForge (`LlamaForCausalLMEagle3`), which vLLM reads
too, and of vLLM's speculators (`speculators_model_type: eagle3`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.cache.specs import LayerSpec
from quire.core.errors import ModelError
from quire.models.base import ForwardContext, LanguageModel, Module
from quire.models.decoder import DecoderModel
from quire.models.decoder_layers import Rotations, layer_of
from quire.models.description import Description
from quire.models.layers.attention import Attention, SelfAttention
from quire.models.layers.common import embed
from quire.models.layers.rope import Rope
from quire.models.settings import Settings
from quire.models.shares import Cuts, Split
from quire.models.state_drafters import check_sizes, description_of

_ARCHITECTURE = "Eagle3"
_KIND = "an EAGLE-3 head"
_STATES = 3
"""Hidden states of the model that are joined."""


@dataclass(frozen=True)
class EagleArguments:
    """Settings of an EAGLE-3 head, from its `config.json`.

    Attributes:
        text: the configuration of the head's layers, as of a Llama.
        vocab_size: size of the head's own vocabulary.
        width: hidden size of the model that it drafts for.
        layers: layers of that model whose inputs are joined; None means the usual three.
        norm_before_residual: whether the first layer adds to its input's norm, not to the input.
        norm_before_fc: whether the joined states are normalised before they are projected.
    """

    text: Mapping[str, Any]
    vocab_size: int
    width: int
    layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EagleArguments:
        """Read a `config.json` of either layout.

        Raises:
            ModelError: a value is missing, or of the wrong type.
        """
        s = Settings(dict(config))
        speculators = s.word("speculators_model_type", default="") == "eagle3"
        text = dict(s.nested("transformer_layer_config").values) if speculators else dict(config)
        text.setdefault("model_type", "llama")
        own = s if speculators else s.nested("eagle_config", needed=False)
        layers = own.integers("eagle_aux_hidden_state_layer_ids")
        if not speculators:  # named by the layers whose outputs they are
            layers = tuple(each + 1 for each in layers)
        hidden = Settings(text).integer("hidden_size")
        return cls(
            text=text,
            vocab_size=s.integer("draft_vocab_size", default=Settings(text).integer("vocab_size")),
            width=s.integer("target_hidden_size", default=hidden),
            layers=layers or None,
            norm_before_residual=s.flag("norm_before_residual", default=False),
            norm_before_fc=s.flag("norm_before_fc", default=False),
        )

    def captured(self, count: int) -> tuple[int, ...]:
        """Return the layers whose inputs the head joins, of a model of `count` layers."""
        return self.layers or (2, count // 2, count - 3)


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is of an EAGLE-3 head."""
    named = config.get("architectures") or ()
    return config.get("speculators_model_type") == "eagle3" or any(
        isinstance(each, str) and each.endswith(_ARCHITECTURE) for each in named
    )


class _FirstLayer(Module):
    """The first layer of a head. Its input is token embeddings joined with hidden states."""

    def __init__(self, whole: Description, *, norm_before_residual: bool) -> None:
        super().__init__()
        (kind,) = whole.layers[0].mixers
        if not isinstance(kind, Attention) or whole.layers[0].feed_forward is None:
            raise ModelError("config.json: an EAGLE-3 head has attention and a feed-forward block")
        hidden = whole.hidden_size
        self._adds_norm = norm_before_residual
        self.input_layernorm = whole.norm.module(hidden)
        self.hidden_norm = whole.norm.module(hidden)
        self.self_attn = SelfAttention(kind, 2 * hidden, layer=0)
        width = kind.heads * (kind.value_dim or kind.head_dim)
        self.self_attn.o_proj = nn.Linear(width, hidden, bias=kind.out_bias)
        self.post_attention_layernorm = whole.norm.module(hidden)
        self.mlp = whole.layers[0].feed_forward.module(hidden)
        self._rotation = kind.rotation

    def __call__(
        self, state: mx.array, embedding: mx.array, step: ForwardContext, rotate: Rotations
    ) -> mx.array:
        """Return the states after the tokens of `embedding`; all are `[T, hidden]`."""
        normed = self.hidden_norm(state)
        joined = mx.concatenate([self.input_layernorm(embedding), normed], axis=-1)
        own = None if self._rotation is None else rotate[self._rotation]
        x = (normed if self._adds_norm else state) + self.self_attn(joined, step, own)
        y: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return y


class EagleHead(LanguageModel):
    """An EAGLE-3 head, named as its checkpoint names it. Row `i` of it goes on from the model's
    hidden states of token `i`, and holds token `i + 1`.

    Args:
        whole: description of its layers.
        model: the model that it drafts for, whose embedding table serves if the head has none.
    """

    def __init__(
        self, args: EagleArguments, whole: Description, model: DecoderModel, *, own_table: bool
    ) -> None:
        super().__init__()
        hidden = whole.hidden_size
        self._vocab_size = model.vocab_size
        # A function, since MLX takes a module for a part of this one.
        self._lent = partial(embed, model.model.embed_tokens)
        if own_table:
            self.embed_tokens = nn.Embedding(whole.vocab_size, hidden)
        if args.norm_before_fc:
            self.input_norm = whole.norm.module(_STATES * args.width)
        self.fc = nn.Linear(_STATES * args.width, hidden, bias=False)
        self.layers: list[Module] = [
            _FirstLayer(whole, norm_before_residual=args.norm_before_residual)
        ]
        self.layers += [
            layer_of(whole, layer, index) for index, layer in enumerate(whole.layers) if index
        ]
        self.norm = whole.norm.module(hidden)
        self.lm_head = nn.Linear(hidden, args.vocab_size, bias=False)
        if args.vocab_size != whole.vocab_size:
            self.d2t = mx.zeros(args.vocab_size, dtype=mx.int32)
        kinds = dict.fromkeys(mixer.rotation for mixer in whole.mixers)
        self._ropes = tuple((kind, Rope(*kind)) for kind in kinds if kind is not None)
        self._layout = tuple(mixer.spec for mixer in whole.mixers)
        self._places: tuple[mx.array, mx.array] | None = None
        """The head's token for each of the model's, and whether it has that one."""

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def project(self, states: mx.array) -> mx.array:
        """Return the head's first states `[T, hidden]` from the model's, `[T, 3 * width]`."""
        if "input_norm" in self:
            states = self.input_norm(states)
        y: mx.array = self.fc(states)
        return y

    def __call__(self, step: ForwardContext) -> mx.array:
        raise AssertionError("a head goes on from states: see `forward`")

    def forward(self, step: ForwardContext, states: mx.array) -> mx.array:
        """Return the states after the step's tokens, `[T, hidden]`, as input of `logits`.

        Args:
            states: the states before them: projected ones of the model, or the head's own.
        """
        own = "embed_tokens" in self
        embedded = partial(embed, self.embed_tokens) if own else self._lent
        embedding = embedded(step.tokens, states.dtype)
        rotate = {kind: rope(step.positions) for kind, rope in self._ropes}
        first, *others = self.layers
        x: mx.array = first(states, embedding, step, rotate=rotate)
        for layer in others:
            x = layer(x, step, rotate)
        return x

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits of the model's vocabulary: minus infinity where the head lacks a token."""
        own = self.lm_head(self.norm(hidden)).astype(mx.float32)
        if "d2t" not in self:
            return own
        if self._places is None:
            shifts = np.array(self.d2t)
            places, there = np.zeros((2, self._vocab_size), dtype=np.int32)
            tokens = np.arange(len(shifts)) + shifts
            places[tokens], there[tokens] = np.arange(len(shifts)), 1
            self._places = mx.array(places), mx.array(there.astype(bool))
        index, has = self._places
        return mx.where(has, own[:, index], -mx.inf)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        raise ModelError("speculate: an EAGLE-3 head cannot be split over devices")

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        ready = {}
        for name, array in weights.items():
            plain = name.removeprefix("model.").replace("midlayer.", "layers.0.")
            if plain == "t2d" or plain.startswith("verifier_") or plain.endswith("inv_freq"):
                continue
            if (plain == "d2t" or plain.startswith("input_norm.")) and plain.split(".")[
                0
            ] not in self:
                continue
            ready[plain] = array.astype(mx.int32) if plain == "d2t" else array
        if "d2t" in ready:
            tokens = np.arange(len(ready["d2t"])) + np.array(ready["d2t"])
            if tokens.min() < 0 or tokens.max() >= self._vocab_size:
                raise ModelError("speculate: d2t names tokens that the model does not have")
        return ready


def build_eagle(
    config: Mapping[str, Any], model: LanguageModel, folder: Path, *, own_table: bool
) -> EagleHead:
    """Return the head that a `config.json` describes, and let the model give the states it joins.

    Args:
        own_table: whether the checkpoint holds an embedding table.

    Raises:
        ModelError: the head was made for another model, or the model's family gives no states.
    """
    args = EagleArguments.of(config)
    whole, model = description_of(_KIND, folder, args.text, model=model)
    own = model.description
    sizes = {
        "target_hidden_size": (args.width, own.hidden_size),
        "vocab_size": (whole.vocab_size, own.vocab_size),
    }
    if not own_table:
        sizes["hidden_size"] = whole.hidden_size, own.hidden_size
    check_sizes(_KIND, folder, sizes)
    layers = args.captured(len(own.layers))
    if len(layers) != _STATES or not all(0 <= each <= len(own.layers) for each in layers):
        raise ModelError(
            f"speculate: the EAGLE-3 head {folder} joins the inputs of layers {list(layers)}; "
            f"the model has {len(own.layers)}, and heads of {_STATES} states are read"
        )
    head = EagleHead(args, whole, model, own_table=own_table)
    model.capture(layers)
    return head
