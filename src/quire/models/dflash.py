"""DFlash drafters (arXiv:2602.06036): a small decoder that drafts a block of tokens at once.

Its keys and values of the tokens so far come from hidden states of some of the model's layers. A
block is the last token and a mask token for each guess; its rows see the tokens so far and each
other, and each mask's row says what stands in its place. Embeddings and head are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import LayerSpec
from quire.core.errors import ModelError
from quire.models.base import ForwardContext, LanguageModel, Module
from quire.models.decoder import DecoderModel
from quire.models.decoder_layers import Rotations, layer_of
from quire.models.description import Description, Layer
from quire.models.layers.attention import Attention, SelfAttention
from quire.models.layers.rope import Rope, Rotate
from quire.models.settings import Settings
from quire.models.shares import Cuts, Split
from quire.models.state_drafters import check_sizes, description_of

_ARCHITECTURE = "DFlashDraftModel"
_KIND = "a DFlash drafter"


@dataclass(frozen=True)
class DFlashArguments:
    """Settings of a DFlash drafter, from its `config.json`.

    Attributes:
        text: the configuration of its layers, as of a Qwen3.
        layers: layers of the model whose inputs are joined.
        block: the most rows of a block.
        mask: the mask token.
        causal: whether a block's rows see only those before them.
    """

    text: Mapping[str, Any]
    layers: tuple[int, ...]
    block: int
    mask: int
    causal: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DFlashArguments:
        """Read a `config.json`.

        Raises:
            ModelError: a value is missing, or of the wrong type.
        """
        s = Settings(dict(config))
        own = s.nested("dflash_config", needed=False)
        if not own.values:
            own = s
        outputs = own.integers("target_layer_ids")
        return cls(
            text=dict(config) | {"model_type": "qwen3"},
            layers=tuple(each + 1 for each in outputs),
            block=s.integer("block_size", default=16),
            mask=own.integer("mask_token_id"),
            causal=own.flag("causal", default=False),
        )


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is of a DFlash drafter."""
    return _ARCHITECTURE in (config.get("architectures") or ())


class _Attention(SelfAttention):
    """Attention whose keys and values may come from the model's states alone."""

    def write(self, context: mx.array, step: ForwardContext, rotate: Rotate | None) -> None:
        """Write the keys and values of the step's rows, `[T, hidden]`; nobody attends."""
        q, k, v = self._at_once(context, rotate)
        step.attend(self._layer, q, k, v, scale=self._kind.scale)


class DFlash(LanguageModel):
    """A DFlash drafter, named as its checkpoint names it.

    Args:
        whole: description of its layers.
        model: the model that it drafts for.
    """

    def __init__(self, args: DFlashArguments, whole: Description, model: DecoderModel) -> None:
        super().__init__()
        hidden = whole.hidden_size
        self.block, self.mask = args.block, args.mask
        # Functions, since MLX takes a module for a part of this one.
        self._embedded, self._logits = partial(model.model.embedded), partial(model.logits)
        self._vocab_size, self._tokens = model.vocab_size, model.embedded_tokens
        self.fc = nn.Linear(len(args.layers) * model.description.hidden_size, hidden, bias=False)
        self.hidden_norm = whole.norm.module(hidden)
        self.layers: list[Module] = []
        self._kinds: list[Attention] = []
        for index, layer in enumerate(whole.layers):
            kind = _kind(layer, causal=args.causal)
            built = layer_of(whole, replace(layer, mixers=(kind,)), index)
            built.self_attn = _Attention(kind, hidden, index)
            self.layers.append(built)
            self._kinds.append(kind)
        self.norm = whole.norm.module(hidden)
        rotations = dict.fromkeys(each.rotation for each in self._kinds)
        self._ropes = tuple((kind, Rope(*kind)) for kind in rotations if kind is not None)

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return tuple(each.spec for each in self._kinds)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def embedded_tokens(self) -> int:
        return self._tokens

    def __call__(self, step: ForwardContext) -> mx.array:
        """Return the states of a step's blocks, `[T, hidden]`, as input of `logits`."""
        x: mx.array = self._embedded(step.tokens)
        rotate = self._rotations(step)
        for layer in self.layers:
            x = layer(x, step, rotate)
        return x

    def read(self, step: ForwardContext, states: mx.array) -> mx.array:
        """Write keys and values of known tokens, and return what they come from, `[T, hidden]`.

        Args:
            states: `[T, layers * width]`, the model's.
        """
        context: mx.array = self.hidden_norm(self.fc(states))
        rotate = self._rotations(step)
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            own = None if kind.rotation is None else rotate[kind.rotation]
            layer.self_attn.write(context, step, own)
        return context

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._logits(self.norm(hidden))
        return logits

    def share(self, split: Split) -> tuple[Self, Cuts]:
        raise ModelError("speculate: a DFlash drafter cannot be split over devices")

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = {name.removeprefix("model."): each for name, each in weights.items()}
        lent = ("embed_tokens.", "lm_head.")
        return {
            name: each
            for name, each in named.items()
            if not name.startswith(lent) and not name.endswith("inv_freq")
        }

    def _rotations(self, step: ForwardContext) -> Rotations:
        return {kind: rope(step.positions) for kind, rope in self._ropes}


def _kind(layer: Layer, *, causal: bool) -> Attention:
    """Return a layer's attention; rows of a block see each other in full layers."""
    (kind,) = layer.mixers
    if not isinstance(kind, Attention) or not kind.plain_heads:
        raise ModelError("config.json: a DFlash drafter has the attention of Qwen3")
    return replace(kind, bidirectional_media=not causal and kind.window is None)


def build_dflash(config: Mapping[str, Any], model: LanguageModel, folder: Path) -> DFlash:
    """Return the drafter that a `config.json` describes, and let the model give the states it
    joins.

    Raises:
        ModelError: the drafter was made for another model, or the model's family gives no states.
    """
    args = DFlashArguments.of(config)
    whole, model = description_of(_KIND, folder, args.text, model=model)
    own = model.description
    sizes = {
        "hidden_size": (whole.hidden_size, own.hidden_size),
        "vocab_size": (whole.vocab_size, own.vocab_size),
    }
    check_sizes(_KIND, folder, sizes)
    count = len(own.layers)
    if not args.layers or not all(0 < each <= count for each in args.layers):
        raise ModelError(
            f"speculate: the DFlash drafter {folder} joins the inputs of layers "
            f"{list(args.layers)}; the model has {count}"
        )
    if not 0 <= args.mask < model.embedded_tokens:
        raise ModelError(f"speculate: {folder}: the model has no token {args.mask}, the mask")
    drafter = DFlash(args, whole, model)
    model.capture(args.layers)
    return drafter
