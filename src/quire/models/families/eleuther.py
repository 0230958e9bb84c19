"""GPT-NeoX (arXiv:2204.06745) and Pythia (arXiv:2304.01373)."""

from __future__ import annotations

import re
from functools import partial

from quire.models.base import LanguageModel
from quire.models.description import Norm, NormPlacement
from quire.models.families.common import Family, activation, attention, decoder, uniform_layers
from quire.models.layers.attention import Attention
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights

_MASKS = re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
"""Constant buffers in old files, which are dropped."""


def gpt_neox(s: Settings) -> LanguageModel:
    norm = Norm(s.number("layer_norm_eps", default=1e-5, minimum=0.0), centred=True, bias=True)
    bias = s.flag("attention_bias", default=True)
    s.only("num_key_value_heads", s.integer("num_attention_heads"))
    rope = s.rope(
        theta=s.number("rotary_emb_base", default=1e4), partial=s.number("rotary_pct", default=0.25)
    )
    usual = attention(s, rope=rope, qkv_bias=bias, out_bias=bias)
    if s.value("hidden_act") == "gelu_fast":
        s = s.changed(hidden_act="gelu_new")  # the same function, written otherwise
    block = MLP(s.integer("intermediate_size"), activation(s, "gelu"), gated=False, bias=True)
    parallel = s.flag("use_parallel_residual", default=True)
    return decoder(
        s,
        uniform_layers(s, usual, block),
        Names(renamed=_PARTS, prepare=partial(_apart, attention=usual)),
        norm=norm,
        placement=NormPlacement.BESIDE if parallel else NormPlacement.PRE,
    )


_PARTS = {
    "embed_in": "embed_tokens",
    "h": "layers",
    "attention": "self_attn",
    "attention.dense": "self_attn.o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
    "final_layer_norm": "norm",
}


def _apart(weights: Weights, attention: Attention) -> Weights:
    """Split fused projections, which interleave queries, keys and values by head."""
    ready: Weights = {}
    for full, array in weights.items():
        name = full.removeprefix("model.").removeprefix("gpt_neox.")
        name = name.replace("embed_out.", "lm_head.")
        path, fused, kind = name.partition("query_key_value.")
        if fused:
            heads = array.reshape(attention.heads, 3, attention.head_dim, *array.shape[1:])
            for at, part in enumerate(("q_proj", "k_proj", "v_proj")):
                ready[f"{path}{part}.{kind}"] = heads[:, at].flatten(0, 1)
        elif not _MASKS.fullmatch(name):
            ready[name] = array
    return ready


FAMILIES = (Family("gpt_neox", "GPT-NeoX, Pythia", gpt_neox),)
