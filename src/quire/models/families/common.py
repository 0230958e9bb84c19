"""Reads the configuration keys that families share into descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import ModelError
from quire.core.values import LARGEST, require
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description, FeedForward, Layer, Mixer, Norm
from quire.models.layers.attention import Attention
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.layers.routers import SigmoidRouter, SoftmaxRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import HeadNames, Names, Weights


@dataclass(frozen=True)
class Family:
    """One `model_type` that is served.

    Attributes:
        title: what people call it.
        build: the model, without weights, from its configuration.
        context: tokens that prompt and answer may have together, where that is not what
            `max_position_embeddings` and YaRN say.
    """

    model_type: str
    title: str
    build: Callable[[Settings], LanguageModel]
    context: Callable[[Settings], int] | None = None


def text_of(s: Settings) -> Settings:
    """Return the decoder's keys. The head is tied if the whole or its `text_config` says so."""
    text = s.within("text_config")
    tied = any(part.flag("tie_word_embeddings", default=False) for part in (s, text))
    return text.changed(tie_word_embeddings=tied)


EXPERT_PARTS = {
    "gate.e_score_correction_bias": "e_score_correction_bias",
    "shared_experts": "shared_expert",
}
"""Names of a router's bias and of the shared expert, as in DeepSeek's checkpoints."""


def activation(s: Settings, default: str = "silu") -> str:
    """Return the name of a known activation."""
    return _known_activation(s, "hidden_act", "hidden_activation", default=default)


def projector_activation(s: Settings) -> str:
    """Return the name of a known activation, of what is between an encoder and the decoder."""
    return _known_activation(s, "projector_hidden_act", default="gelu")


def _known_activation(s: Settings, *names: str, default: str) -> str:
    name = s.word(*names, default=default)
    require(names[0], name, ACTIVATIONS)
    return name


def rms(s: Settings, default: float = 1e-6, **changes: Any) -> Norm:
    """Return the root mean square norm of most families."""
    return replace(Norm(s.number("rms_norm_eps", default=default, minimum=0.0)), **changes)


def attention(s: Settings, **changes: Any) -> Attention:
    """Full attention, biased everywhere or nowhere.

    Raises:
        ModelError: a value is of another type, or the file turns off norms that the family has.
    """
    if changes.get("qk_norm") is not None:
        s.only("use_qk_norm", True)  # some files name what their family always has
    heads = s.integer("num_attention_heads")
    head_dim = s.integer("head_dim", default=s.integer("hidden_size") // heads)
    kv_heads = s.integer("num_key_value_heads", default=heads)
    if max(heads, kv_heads) * head_dim > LARGEST:
        raise ModelError(
            f"{s.file}: {s.prefix}head_dim = {head_dim} in {max(heads, kv_heads)} heads is more "
            f"than {LARGEST}"
        )
    bias = s.flag("attention_bias", default=False)
    usual = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=changes.get("rope") or s.rope(),
        qkv_bias=bias,
        out_bias=bias,
    )
    return replace(usual, **changes)


def mlp(s: Settings, **changes: Any) -> MLP:
    """Return a gated block."""
    bias = s.flag("mlp_bias", default=False)
    usual = MLP(s.integer("intermediate_size"), activation(s), bias=bias)
    return replace(usual, **changes)


def gate_up(s: Settings) -> tuple[tuple[str, int], ...]:
    """Return the rows of a projection that holds a gated block's first two; see `Names.fused`."""
    width = s.integer("intermediate_size")
    return (("gate_proj", width), ("up_proj", width))


def query_key_value(kind: Attention) -> tuple[tuple[str, int], ...]:
    """Return the rows of a projection that holds attention's first three; see `Names.fused`."""
    width, kv_width = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
    return (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))


def softmax_mixture(s: Settings, **changes: Any) -> Mixture:
    """Experts behind a softmax router."""
    usual = Mixture(
        experts=s.integer("num_experts", "num_local_experts"),
        width=changes.get("width") or s.integer("moe_intermediate_size"),
        activation=activation(s),
        router=SoftmaxRouter(
            s.integer("num_experts_per_tok"), s.flag("norm_topk_prob", default=False)
        ),
    )
    return replace(usual, **changes)


def sigmoid_mixture(s: Settings, **changes: Any) -> Mixture:
    """Experts as in DeepSeek V3, with their shared ones in one block."""
    width, experts = s.integer("moe_intermediate_size"), s.integer("n_routed_experts")
    s.only("scoring_func", "sigmoid")
    s.only("topk_method", "noaux_tc")
    groups = s.integer("n_group", default=1)
    require("n_routed_experts % n_group", experts % groups, (0,))
    usual = Mixture(
        experts=experts,
        width=width,
        activation=activation(s),
        router=SigmoidRouter(
            k=s.integer("num_experts_per_tok"),
            normalise=s.flag("norm_topk_prob", default=True),
            scale=s.number("routed_scaling_factor", default=1.0),
            groups=groups,
            best_groups=s.integer("topk_group", default=1),
        ),
        shared_width=width * s.integer("n_shared_experts", default=0, minimum=0),
    )
    return replace(usual, **changes)


def channels_last(weights: Weights) -> Weights:
    """Short convolutions as MLX has them, `[channels, kernel, 1]`."""
    return {
        name: array.swapaxes(-1, -2)
        if name.endswith((".conv1d.weight", ".conv.conv.weight")) and array.shape[-1] != 1
        else array
        for name, array in weights.items()
    }


def uniform_layers(s: Settings, mixer: Mixer, feed_forward: FeedForward) -> tuple[Layer, ...]:
    """Return the layers that are all the same."""
    return (Layer((mixer,), feed_forward),) * s.integer("num_hidden_layers")


def full_every(s: Settings, number: int, others: str = SLIDING) -> list[str]:
    """Return the types of layers of which the last one of each `number` is full."""
    count = s.integer("num_hidden_layers")
    return [others if (index + 1) % number else FULL for index in range(count)]


def by_type(
    types: tuple[str, ...], mixers: Mapping[str, Mixer], feed_forward: FeedForward
) -> tuple[Layer, ...]:
    """Return the layers whose attention follows from their types."""
    return tuple(Layer((mixers[kind],), feed_forward) for kind in types)


def windows(s: Settings, usual: Attention, default: int | None = None) -> dict[str, Mixer]:
    """`usual` for layers of each type."""
    return {FULL: usual, SLIDING: replace(usual, window=s.window(default))}


def with_dense(
    layers: tuple[Layer, ...], dense: FeedForward, which: Callable[[int], bool]
) -> tuple[Layer, ...]:
    """Return the same with dense blocks instead of experts in some layers."""
    return tuple(
        replace(layer, feed_forward=dense) if which(index) else layer
        for index, layer in enumerate(layers)
    )


def dense_by_type(s: Settings, first: int) -> Callable[[int], bool]:
    """Return a test whether a layer is dense, by `mlp_layer_types` if present.

    Args:
        first: so many have, where it is not.

    Raises:
        ModelError: an unknown type, or not one a layer.
    """
    types = s.names("mlp_layer_types")
    for kind in types:
        require("mlp_layer_types", kind, ("dense", "sparse"))
    count = s.integer("num_hidden_layers")
    if types and len(types) != count:
        raise ModelError(f"{s.file}: {len(types)} mlp_layer_types for {count} layers")
    return lambda index: types[index] == "dense" if types else index < first


def extra_layer(count: int) -> HeadNames:
    """Return the names of a head that lies behind `count` layers, as in DeepSeek V3 and GLM."""
    layer = f"layers.{count}."
    parts = {
        "eh_proj": "fc",
        "enorm": "embedding_norm",
        "hnorm": "hidden_norm",
        "shared_head.norm": "norm",
    }
    return HeadNames(
        layer,
        {layer + theirs: ours for theirs, ours in parts.items()},
        copies=(layer + "embed_tokens.", layer + "shared_head.head."),
    )


def described(
    s: Settings, layers: tuple[Layer, ...], *, tied: bool = False, **changes: Any
) -> Description:
    """Return the decoder of these layers, its other parts as usual.

    Args:
        tied: whether the head is the embedding table where the configuration does not say.
    """
    usual = Description(
        vocab_size=s.integer("vocab_size"),
        hidden_size=s.integer("hidden_size"),
        layers=layers,
        norm=changes.pop("norm", None) or rms(s),
        tied_head=s.flag("tie_word_embeddings", default=tied),
    )
    s.refuse_unasked()
    whole = replace(usual, **changes)
    if whole.tied_head and whole.head_bias:
        require("tie_word_embeddings", True, (False,))  # this family's head has a bias
    return whole


def decoder(
    s: Settings, layers: tuple[Layer, ...], names: Names | None = None, **changes: Any
) -> DecoderModel:
    """Return the model of what is `described`."""
    return DecoderModel(described(s, layers, **changes), names or Names())
