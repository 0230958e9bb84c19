"""EXAONE 3 (arXiv:2408.03541), 4.0 (arXiv:2507.11407) and K-EXAONE (arXiv:2601.01739)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description, Mixer, NormPlacement
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    by_type,
    decoder,
    dense_by_type,
    described,
    full_every,
    mlp,
    rms,
    sigmoid_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import QKNorm
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names


def exaone(s: Settings) -> LanguageModel:
    """Build EXAONE 3.0 and 3.5, which are Llama's decoder under other names."""
    s = s.filled(rms_norm_eps=1e-5)
    layers = uniform_layers(s, attention(s, rope=s.rope(theta=5e5)), mlp(s))
    return decoder(s, layers, Names(renamed=_FIRST_PARTS))


_FIRST_PARTS = {
    "model.transformer": "model",
    "wte": "embed_tokens",
    "h": "layers",
    "ln_f": "norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.attention": "self_attn",
    "attn.attention.out_proj": "self_attn.o_proj",
    "c_fc_0": "gate_proj",
    "c_fc_1": "up_proj",
    "c_proj": "down_proj",
}
"""Names of tensors that EXAONE 3 was published with."""


def exaone4(s: Settings) -> LanguageModel:
    return DecoderModel(exaone4_described(s), Names())


def exaone4_described(s: Settings) -> Description:
    """Describe EXAONE 4's decoder."""
    layers = by_type(*_mixers(s), mlp(s, bias=False))
    return described(s, layers, norm=rms(s, 1e-5), placement=NormPlacement.POST)


def exaone_moe(s: Settings) -> LanguageModel:
    """Build K-EXAONE, with norms before the blocks, and experts."""
    first = s.integer("first_k_dense_replace", default=1, minimum=0)
    listed = s.value("is_moe_layer")  # key of files older than transformers' support
    if isinstance(listed, list):
        s = s.filled(mlp_layer_types=["sparse" if each else "dense" for each in listed])
    else:
        s.only("is_moe_layer", [])
    dense = dense_by_type(s, first)
    experts = sigmoid_mixture(
        s.filled(
            n_routed_experts=s.integer("num_experts", default=64),
            n_shared_experts=s.integer("num_shared_experts", default=1, minimum=0),
            routed_scaling_factor=2.5,
        )
    )
    layers = with_dense(by_type(*_mixers(s), experts), mlp(s, bias=False), dense)
    names = Names(renamed=EXPERT_PARTS, unused=("mtp.",))
    return decoder(s, layers, names, norm=rms(s, 1e-5))


def _mixers(s: Settings) -> tuple[tuple[str, ...], dict[str, Mixer]]:
    """Return the layers' types, and attention by type. If there is a window, only sliding layers
    rotate.
    """
    norm, window = rms(s, 1e-5), s.window(4096)
    usual = attention(s, qk_norm=QKNorm(norm), qkv_bias=False, out_bias=False)
    mixers: dict[str, Mixer] = {
        FULL: usual if window is None else replace(usual, rope=None),
        SLIDING: replace(usual, window=window),
    }
    return s.layer_types(_types(s, window)), mixers


def _types(s: Settings, window: int | None) -> list[str]:
    """Return layer types by a pattern: a number n (every n-th layer is full) or letters (L sliding,
    G full).
    """
    count, pattern = s.integer("num_hidden_layers"), s.values.get("sliding_window_pattern", 4)
    if window is None or not pattern:
        return [FULL] * count
    if isinstance(pattern, str):
        types = [
            SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(count)
        ]
        return [*types[:-1], FULL]
    return full_every(s, s.integer("sliding_window_pattern", default=4))


FAMILIES = (
    Family("exaone", "EXAONE 3.0, 3.5", exaone),
    Family("exaone4", "EXAONE 4.0", exaone4),
    Family("exaone_moe", "K-EXAONE", exaone_moe),
)
