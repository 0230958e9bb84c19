"""InternLM 2 and 2.5 (arXiv:2403.17297): Llama under other names, with fused attention projections.

InternLM 3 is Llama, with biases if its configuration says so.
"""

from __future__ import annotations

from functools import partial

from quire.models.base import LanguageModel
from quire.models.families.common import Family, attention, decoder, mlp, rms, uniform_layers
from quire.models.layers.attention import Attention
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights, renamed


def internlm2(s: Settings) -> LanguageModel:
    bias = s.flag("bias", default=True)
    usual = attention(s, qkv_bias=bias, out_bias=bias)
    names = Names(prepare=partial(_as_llama, usual))
    return decoder(s, uniform_layers(s, usual, mlp(s, bias=False)), names)


def internlm3(s: Settings) -> LanguageModel:
    bias = s.flag("bias", "mlp_bias", default=False)
    qkv_bias = s.flag("qkv_bias", "attention_bias", default=False)
    usual = attention(s, qkv_bias=qkv_bias, out_bias=bias)
    return decoder(s, uniform_layers(s, usual, mlp(s, bias=bias)), norm=rms(s, 1e-5))


_PARTS = {
    "tok_embeddings": "embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wo": "self_attn.o_proj",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "output": "lm_head",
}


def _as_llama(kind: Attention, weights: Weights) -> Weights:
    ready: Weights = {}
    for name, array in weights.items():
        if ".attention.wqkv." not in name:
            ready[renamed(name, _PARTS)] = array
            continue
        # Rows of each KV head: its queries, then its key and its value.
        rows = array.reshape(kind.kv_heads, -1, kind.head_dim, *array.shape[1:])
        parts = {"q_proj": rows[:, :-2], "k_proj": rows[:, -2:-1], "v_proj": rows[:, -1:]}
        for part, heads in parts.items():
            plain = name.replace("wqkv", part)
            ready[renamed(plain, _PARTS)] = heads.reshape(-1, *array.shape[1:])
    return ready


FAMILIES = (
    Family("internlm2", "InternLM 2 and 2.5", internlm2),
    Family("internlm3", "InternLM 3", internlm3),
)
