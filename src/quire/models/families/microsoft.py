"""Phi 1, 1.5, 2 (arXiv:2309.05463), 3, 3.5, 4, Phi-3.5-MoE (arXiv:2404.14219), and BitNet."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.description import Norm, NormPlacement
from quire.models.families.common import (
    Family,
    activation,
    attention,
    decoder,
    gate_up,
    mlp,
    query_key_value,
    rms,
    softmax_mixture,
    uniform_layers,
)
from quire.models.layers.attention import QKNorm
from quire.models.layers.feed_forward import MLP, NormedMLP
from quire.models.layers.routers import SparseMixer
from quire.models.settings import Settings
from quire.models.weights.names import Names


def phi(s: Settings) -> LanguageModel:
    norm = Norm(s.number("layer_norm_eps", default=1e-5, minimum=0.0), centred=True, bias=True)
    usual = attention(
        s,
        rope=s.rope(partial=0.5),
        qkv_bias=True,
        out_bias=True,
        qk_norm=QKNorm(norm) if s.flag("qk_layernorm", default=False) else None,
    )
    block = MLP(s.integer("intermediate_size"), activation(s, "gelu_new"), gated=False, bias=True)
    parts = {
        "self_attn.dense": "self_attn.o_proj",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
        "fc1": "up_proj",
        "fc2": "down_proj",
        "final_layernorm": "norm",
    }
    return decoder(
        s,
        uniform_layers(s, usual, block),
        Names(renamed=parts),
        norm=norm,
        placement=NormPlacement.PARALLEL,
        head_bias=True,
    )


def phi3(s: Settings) -> LanguageModel:
    if s.rope_type() in ("su", "yarn"):  # early names of longrope
        s = s.changed(rope_scaling=s.scaling().values | {"rope_type": "longrope"})
    usual = attention(
        s, rope=s.rope(partial=1.0), qkv_bias=False, out_bias=False, window=s.window()
    )
    names = Names(fused={"qkv_proj": query_key_value(usual), "gate_up_proj": gate_up(s)})
    return decoder(s, uniform_layers(s, usual, mlp(s, bias=False)), names, norm=rms(s, 1e-5))


def phimoe(s: Settings) -> LanguageModel:
    s = s.filled(num_experts_per_tok=2)
    s.only("num_experts_per_tok", 2)
    usual = attention(s, rope=s.rope(theta=1e6), window=s.window())
    router = SparseMixer(s.number("router_jitter_noise", default=0.01))
    experts = softmax_mixture(s, width=s.integer("intermediate_size"), router=router)
    parts = {
        "block_sparse_moe": "mlp",
        "router": "gate",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }
    return decoder(
        s,
        uniform_layers(s, usual, experts),
        Names(renamed=parts),
        norm=rms(s, 1e-5, centred=True, bias=True),
        head_bias=s.flag("lm_head_bias", default=False),
    )


def bitnet(s: Settings) -> LanguageModel:
    """Build BitNet (arXiv:2402.17764), which normalises what each last product of a block reads."""
    norm = rms(s, 1e-5)
    usual = attention(s, rope=s.rope(theta=5e5), out_norm=norm)
    block = NormedMLP(s.integer("intermediate_size"), activation(s, "relu2"), norm)
    names = Names(renamed={"attn_sub_norm": "out_norm", "ffn_sub_norm": "inner_norm"})
    return decoder(s, uniform_layers(s, usual, block), names, norm=norm)


FAMILIES = (
    Family("bitnet", "BitNet b1.58", bitnet),
    Family("phi", "Phi 1, 1.5, 2", phi),
    Family("phi3", "Phi 3, 3.5, 4", phi3),
    Family("phimoe", "Phi-3.5-MoE", phimoe),
)
