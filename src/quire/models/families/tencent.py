"""Hunyuan, dense and of experts."""

from __future__ import annotations

from quire.models.attention import Attention, QKNorm
from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    attention,
    decoder,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
)
from quire.models.names import Names
from quire.models.routers import SoftmaxRouter
from quire.models.settings import Settings

NAMES = Names(
    renamed={
        "query_layernorm": "q_norm",
        "key_layernorm": "k_norm",
        "gate.wg": "gate",
        "shared_mlp": "shared_expert",
    }
)


def hunyuan_dense(s: Settings) -> LanguageModel:
    layers = uniform_layers(s, hunyuan_attention(s), mlp(s, bias=False))
    return decoder(s, layers, NAMES, norm=rms(s, 1e-5))


def hunyuan_attention(s: Settings) -> Attention:
    s.only("use_cla", False)  # keys and values shared between layers
    return attention(s, qk_norm=QKNorm(rms(s, 1e-5), after_rotation=True))


def hunyuan_moe(s: Settings) -> LanguageModel:
    """Each layer has its own number of chosen experts in the file, all alike in those published."""
    k, experts, shared = (
        _same(s, name, 1) for name in ("moe_topk", "num_experts", "num_shared_expert")
    )
    width = _same(s, "moe_intermediate_size", s.integer("intermediate_size"))
    mixture = softmax_mixture(
        s.changed(num_experts=experts, num_experts_per_tok=k, moe_intermediate_size=width),
        router=SoftmaxRouter(k, normalise=True),
        shared_width=s.integer("intermediate_size") * shared,
    )
    layers = uniform_layers(s, hunyuan_attention(s), mixture)
    return decoder(s, layers, NAMES, norm=rms(s, 1e-5))


def _same(s: Settings, name: str, default: int) -> int:
    """A number that the file may repeat for each layer."""
    listed = s.values.get(name)
    if not isinstance(listed, list):
        return s.integer(name, default=default, minimum=0)
    s.only(name, listed[:1] * len(listed))
    first = listed[0] if listed else default
    return s.changed(**{name: first}).integer(name, minimum=0)


FAMILIES = (
    Family("hunyuan_v1_dense", "Hunyuan 0.5B to 7B", hunyuan_dense),
    Family("hunyuan_v1_moe", "Hunyuan A13B", hunyuan_moe),
)
