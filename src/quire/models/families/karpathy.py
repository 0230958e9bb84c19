"""NanoChat (github.com/karpathy/nanochat)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    activation,
    attention,
    decoder,
    mlp,
    rms,
    uniform_layers,
)
from quire.models.layers.attention import Attention, QKNorm
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights, float_type


def nanochat(s: Settings) -> LanguageModel:
    """Build NanoChat, whose norms have no weights, and which rotates the other way round."""
    bare = replace(rms(s), weighted=False)
    usual = attention(s, qk_norm=QKNorm(bare, after_rotation=True))
    layers = uniform_layers(s, usual, mlp(s, gated=False, activation=activation(s, "relu2")))
    names = Names(
        renamed=_PARTS,
        prepare=partial(
            _prepared, kind=usual, norms=_norms(len(layers)), hidden_size=s.integer("hidden_size")
        ),
    )
    return decoder(
        s,
        layers,
        names,
        embedding_norm=bare,
        logit_softcap=None
        if s.null("final_logit_softcapping")
        else s.number("final_logit_softcapping", default=15.0),
    )


_PARTS = {
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    # mlx-lm's
    "model.transformer.wte": "model.embed_tokens",
    "model.transformer.h": "model.layers",
    **{f"attn.c_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_TURNED = (".q_proj", ".k_proj", ".c_q", ".c_k")


def _norms(layers: int) -> list[str]:
    """Return the names of all norms."""
    names = ("input_layernorm", "post_attention_layernorm")
    each = [f"layers.{index}.{name}" for index in range(layers) for name in names]
    return [f"model.{name}.weight" for name in (*each, "norm")]


def _prepared(weights: Weights, kind: Attention, norms: list[str], hidden_size: int) -> Weights:
    """Swap the halves of each head's query and key, which turns their rotation, and add norms with
    weights of one.
    """
    ready = dict(weights)
    for name, array in weights.items():
        if name.rpartition(".")[0].endswith(_TURNED):
            heads = array.reshape(-1, 2, kind.head_dim // 2, *array.shape[1:])
            ready[name] = heads[:, ::-1].flatten(0, 2)
    return ready | dict.fromkeys(norms, mx.ones(hidden_size, float_type(weights)))


FAMILIES = (Family("nanochat", "NanoChat", nanochat),)
