"""LongCat Flash (arXiv:2509.01322): two layers of latent attention share a mixture of experts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import Layer, NormPlacement
from quire.models.families.common import Family, decoder, mlp, softmax_mixture
from quire.models.families.deepseek import latent_attention
from quire.models.layers.feed_forward import ShortcutExperts
from quire.models.layers.latent_attention import LatentAttention
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights


def longcat_flash(s: Settings) -> LanguageModel:
    s.only("attention_method", "MLA")
    s.only("zero_expert_type", "identity")
    s.only("router_bias", False)
    s = s.filled(rms_norm_eps=1e-5, num_experts_per_tok=12, moe_intermediate_size=2048)
    s = s.filled(rope_theta=1e7, intermediate_size=12288)
    usual = latent_attention(s)
    factor = _factor(s, "mla_scale_q_lora", usual.query_latent_dim)
    first = replace(usual, scale=usual.scale * factor)
    count = s.integer("n_routed_experts")
    router = SoftmaxRouter(
        s.integer("num_experts_per_tok"),
        normalise=s.flag("norm_topk_prob", default=False),
        corrected=True,
        scale=s.number("routed_scaling_factor", default=6.0),
    )
    experts = softmax_mixture(
        s.changed(num_experts=count),
        router=router,
        identities=s.integer("zero_expert_num", default=256, minimum=0),
    )
    layer = Layer(
        (first, replace(first, attribute="second_attn")),
        ShortcutExperts(mlp(s, bias=False), experts),
    )
    names = Names(
        renamed=_PARTS,
        unused=("mtp.",),
        prepare=partial(
            _prepared,
            latents=usual,
            factor=_factor(s, "mla_scale_kv_lora", usual.latent_dim),
            experts=count,
        ),
    )
    layers = (layer,) * s.integer("num_hidden_layers")
    return decoder(s, layers, names, placement=NormPlacement.SHORTCUT)


def _factor(s: Settings, name: str, latent_dim: int | None) -> float:
    """Return the factor of a latent, which gives it the variance of the hidden states."""
    if latent_dim is None or not s.flag(name, default=True):
        return 1.0
    factor: float = (s.integer("hidden_size") / latent_dim) ** 0.5
    return factor


_PARTS = {
    "self_attn.0": "self_attn",
    "self_attn.1": "second_attn",
    "input_layernorm.0": "input_layernorm",
    "input_layernorm.1": "second_input_layernorm",
    "post_attention_layernorm.0": "post_attention_layernorm",
    "post_attention_layernorm.1": "second_post_attention_layernorm",
    "mlps.0": "mlp.first",
    "mlps.1": "mlp.second",
    "mlp.experts": "mlp.mixture.experts",
    "mlp.switch_mlp": "mlp.mixture.experts",
    "mlp.router": "mlp.mixture",
    "mlp.router.classifier": "mlp.mixture.gate",
}
_NUMBERED = re.compile(r".*\.experts\.(\d+)\..*")


def _prepared(weights: Weights, latents: LatentAttention, factor: float, experts: int) -> Weights:
    """Split the latents' matrices, and join their factor to their norms.

    Transformers has matrices of experts that are identities, too, which nothing reads.
    """
    ready: Weights = {}
    for name, array in latents.absorbed(weights).items():
        if name.endswith(".kv_a_layernorm.weight"):
            array = (array.astype(mx.float32) * factor).astype(array.dtype)
        elif name.endswith(".experts.gate_up_proj"):
            array = array[:experts]
        if not (match := _NUMBERED.fullmatch(name)) or int(match[1]) < experts:
            ready[name] = array
    return ready


FAMILIES = (Family("longcat_flash", "LongCat Flash", longcat_flash),)
