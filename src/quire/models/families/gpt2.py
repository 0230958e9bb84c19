"""GPT-2; StarCoder (arXiv:2305.06161) and SantaCoder, with one head of keys and values."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from quire.models.base import LanguageModel
from quire.models.description import Layer, Norm
from quire.models.families.common import Family, activation, attention, decoder, query_key_value
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights


def gpt2(s: Settings) -> LanguageModel:
    by_layer = s.flag("scale_attn_by_inverse_layer_idx", default=False)
    return _placed(s, "gelu_new", s.integer("num_attention_heads"), by_layer=by_layer)


def gpt_bigcode(s: Settings) -> LanguageModel:
    s.only("multi_query", True)
    return _placed(s, "gelu_pytorch_tanh", kv_heads=1)


def _placed(
    s: Settings, default_activation: str, kv_heads: int, by_layer: bool = False
) -> LanguageModel:
    """Build a decoder with learned positions.

    Args:
        by_layer: whether scores are divided by their layer's number, counted from one.
    """
    s.only("add_cross_attention", False)
    s.only("num_key_value_heads", kv_heads)
    s = s.changed(num_key_value_heads=kv_heads)
    hidden = s.integer("hidden_size")
    usual = attention(s, rope=None, qkv_bias=True, out_bias=True)
    if not s.flag("scale_attn_weights", default=True):
        usual = replace(usual, scale=1.0)
    width = s.integer("intermediate_size", default=4 * hidden)
    block = MLP(width, activation(s, default_activation), gated=False, bias=True)
    layers = tuple(
        Layer((replace(usual, scale=usual.scale / (index + 1 if by_layer else 1)),), block)
        for index in range(s.integer("num_hidden_layers"))
    )
    names = Names(
        renamed=_PARTS,
        fused={"c_attn": query_key_value(usual)},
        prepare=partial(_by_rows, hidden_size=hidden),
    )
    return decoder(
        s,
        layers,
        names,
        norm=Norm(
            s.number("layer_norm_epsilon", default=1e-5, minimum=0.0), centred=True, bias=True
        ),
        positions=s.integer("max_position_embeddings"),
        tied=True,
    )


_PARTS = {
    "model.transformer": "model",
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "h": "layers",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "ln_f": "norm",
    "attn": "self_attn",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_MASKS = re.compile(r".*\.attn\.(bias|masked_bias)")
"""Constant buffers in old files, which are dropped."""
_JOINED = ".attn.c_attn.weight"


def _by_rows(weights: Weights, hidden_size: int) -> Weights:
    """Transpose matrices that are stored by columns, as in GPT-2's published files."""
    by_columns = {
        name.removesuffix(_JOINED)
        for name, array in weights.items()
        if name.endswith(_JOINED) and array.shape[0] == hidden_size
    }
    ready: Weights = {}
    for name, array in weights.items():
        layer, _, part = name.rpartition(".c_")
        if part.endswith(".weight") and layer.rpartition(".")[0] in by_columns:
            array = array.T
        if not _MASKS.fullmatch(name):
            ready[name] = array
    return ready


FAMILIES = (
    Family("gpt2", "GPT-2", gpt2),
    Family("gpt_bigcode", "StarCoder, SantaCoder", gpt_bigcode),
)
