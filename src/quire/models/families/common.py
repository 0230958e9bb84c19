"""Reads configuration keys that families share into descriptions."""

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
    """A supported `model_type`.

    Attributes:
        title: the family's usual name.
        build: builds the model, without weights, from its configuration.
        context: reads the context length, for families where `max_position_embeddings` and YaRN do
            not give it.
    """

    model_type: str
    title: str
    build: Callable[[Settings], LanguageModel]
    context: Callable[[Settings], int] | None = None


def text_of(s: Settings) -> Settings:
    """Return the text part's settings. The head is tied if either the outer or the text part says
    so.
    """
    text = s.within("text_config")
    tied = any(part.flag("tie_word_embeddings", default=False) for part in (s, text))
    return text.changed(tie_word_embeddings=tied)


EXPERT_PARTS = {
    "gate.e_score_correction_bias": "e_score_correction_bias",
    "shared_experts": "shared_expert",
}
"""Names of the router's bias and of the shared expert in DeepSeek's checkpoints."""


def activation(s: Settings, default: str = "silu") -> str:
    """Read the name of the activation."""
    return _known_activation(s, "hidden_act", "hidden_activation", default=default)


def projector_activation(s: Settings) -> str:
    """Read the name of the activation between an encoder and the decoder."""
    return _known_activation(s, "projector_hidden_act", default="gelu")


def _known_activation(s: Settings, *names: str, default: str) -> str:
    name = s.word(*names, default=default)
    require(names[0], name, ACTIVATIONS)
    return name


def rms(s: Settings, default: float = 1e-6, **changes: Any) -> Norm:
    """Return the usual norm: root mean square."""
    return replace(Norm(s.number("rms_norm_eps", default=default, minimum=0.0)), **changes)


def attention(s: Settings, **changes: Any) -> Attention:
    """Return full attention, with biases in all projections or in none.

    Raises:
        ModelError: a value has another type, or the file turns off norms that the family always
            has.
    """
    if changes.get("qk_norm") is not None:
        s.only("use_qk_norm", True)  # some files state a setting that the family always has
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
    """Return a gated MLP."""
    bias = s.flag("mlp_bias", default=False)
    usual = MLP(s.integer("intermediate_size"), activation(s), bias=bias)
    return replace(usual, **changes)


def gate_up(s: Settings) -> tuple[tuple[str, int], ...]:
    """Return the parts of a fused projection of a gated MLP, for `Names.fused`."""
    width = s.integer("intermediate_size")
    return (("gate_proj", width), ("up_proj", width))


def query_key_value(kind: Attention) -> tuple[tuple[str, int], ...]:
    """Return the parts of a fused query, key and value projection, for `Names.fused`."""
    width, kv_width = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
    return (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))


def softmax_mixture(s: Settings, **changes: Any) -> Mixture:
    """Return a mixture of experts with a softmax router."""
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
    """Return a mixture of experts as in DeepSeek V3, whose shared experts form one block."""
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
    """Convert short convolutions to MLX's layout `[channels, kernel, 1]`."""
    return {
        name: array.swapaxes(-1, -2)
        if name.endswith((".conv1d.weight", ".conv.conv.weight")) and array.shape[-1] != 1
        else array
        for name, array in weights.items()
    }


def uniform_layers(s: Settings, mixer: Mixer, feed_forward: FeedForward) -> tuple[Layer, ...]:
    """Return equal layers."""
    return (Layer((mixer,), feed_forward),) * s.integer("num_hidden_layers")


def full_every(s: Settings, number: int, others: str = SLIDING) -> list[str]:
    """Return layer types of which every `number`-th is full."""
    count = s.integer("num_hidden_layers")
    return [others if (index + 1) % number else FULL for index in range(count)]


def by_type(
    types: tuple[str, ...], mixers: Mapping[str, Mixer], feed_forward: FeedForward
) -> tuple[Layer, ...]:
    """Return layers whose attention depends on their type."""
    return tuple(Layer((mixers[kind],), feed_forward) for kind in types)


def windows(s: Settings, usual: Attention, default: int | None = None) -> dict[str, Attention]:
    """Return `usual` for full layers, and with a window for sliding ones."""
    return {FULL: usual, SLIDING: replace(usual, window=s.window(default))}


def with_dense(
    layers: tuple[Layer, ...], dense: FeedForward, which: Callable[[int], bool]
) -> tuple[Layer, ...]:
    """Return the layers with a dense block instead of experts in some."""
    return tuple(
        replace(layer, feed_forward=dense) if which(index) else layer
        for index, layer in enumerate(layers)
    )


def dense_by_type(s: Settings, first: int) -> Callable[[int], bool]:
    """Return a test of whether a layer is dense, by `mlp_layer_types` if present.

    Args:
        first: number of dense layers at the start, if the key is absent.

    Raises:
        ModelError: a type is unknown, or their number is not that of the layers.
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
    return head_names(f"layers.{count}.", norm="shared_head.norm")


def head_names(layer: str, norm: str) -> HeadNames:
    """Return the names of a head whose parts lie within its layer.

    Args:
        layer: prefix of the layer's names.
        norm: name of the norm before the logits.
    """
    parts = {"eh_proj": "fc", "enorm": "embedding_norm", "hnorm": "hidden_norm", norm: "norm"}
    return HeadNames(
        layer,
        {layer + theirs: ours for theirs, ours in parts.items()},
        copies=(layer + "embed_tokens.", layer + "shared_head.head."),
    )


def described(
    s: Settings, layers: tuple[Layer, ...], *, tied: bool = False, **changes: Any
) -> Description:
    """Return the description of a decoder with these layers and the usual other parts.

    Args:
        tied: whether the head is the embedding table if the configuration does not say.
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
        require("tie_word_embeddings", value=True, known=(False,))  # this family's head has a bias
    return whole


def decoder(
    s: Settings, layers: tuple[Layer, ...], names: Names | None = None, **changes: Any
) -> DecoderModel:
    """Build the model of a `described` decoder."""
    return DecoderModel(described(s, layers, **changes), names or Names())
