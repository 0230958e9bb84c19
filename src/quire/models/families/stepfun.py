"""Step 3.5 Flash (arXiv:2602.10604) and Step 3.7."""

from __future__ import annotations

import re
from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import FeedForward, Layer
from quire.models.families.common import (
    Family,
    attention,
    decoder,
    mlp,
    rms,
    softmax_mixture,
    text_of,
)
from quire.models.layers.attention import Attention, OutputGate, QKNorm
from quire.models.layers.rope import RopeParameters
from quire.models.layers.routers import SigmoidRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names, Weights


def step3p5(s: Settings) -> LanguageModel:
    """Build a model whose layers have their own rotations and limits, and sliding ones their own
    heads.
    """
    s.only("moe_router_activation", "sigmoid")
    s.only("use_moe_router_bias", True)
    s.only("zero_centered", True)
    for never in ("sink", "use_mfa", "use_rope_layers"):
        s.only(never, False, [])
    count = s.integer("num_hidden_layers")
    listed = s.value("layer_types")
    if isinstance(listed, list):  # of further layers too, see `_as_converted`
        s = s.changed(layer_types=listed[:count] or None)
    types = s.layer_types([FULL if index % 2 else SLIDING for index in range(count)])
    blocks = _blocks(s)
    layers = tuple(
        Layer((mixer,), block) for mixer, block in zip(_mixers(s, types), blocks, strict=True)
    )
    names = Names(
        renamed={
            "gate.gate": "gate",
            "gate.router_bias": "e_score_correction_bias",
            "router_bias": "e_score_correction_bias",
            "share_expert": "shared_expert",
        },
        unused=_ENCODER,
        prepare=lambda weights: _as_converted(weights, count),
    )
    return decoder(s, layers, names, norm=rms(s, 1e-5))


def step3p7(s: Settings) -> LanguageModel:
    """Build Step 3.7 for text: Step 3.5's decoder. Its encoder is left out."""
    text = text_of(s)
    text.only("model_type", "step3p5")
    return step3p5(text)


_ENCODER = (
    *("vision_model.", "vit_large_projector.", "vit_downsampler", "conv1.", "transformer."),
    *("ln_pre.", "ln_post.", "positional_embedding", "class_embedding"),
)
"""How names of the encoder's tensors begin."""


def _mixers(s: Settings, types: tuple[str, ...]) -> list[Attention]:
    """Return each layer's attention."""
    gate = OutputGate(by_head=True) if s.flag("use_head_wise_attn_gate", default=True) else None
    rotations = _rotations(s, types)
    usual = attention(
        s.changed(num_key_value_heads=s.integer("num_attention_groups")),
        rope=rotations[0],
        qk_norm=QKNorm(rms(s, 1e-5)),
        own_gate=gate,
    )
    other = s.within("attention_other_setting")
    own = s.has("attention_other_setting")
    sliding = replace(
        usual,
        heads=other.integer("num_attention_heads") if own else usual.heads,
        kv_heads=other.integer("num_attention_groups") if own else usual.kv_heads,
        window=s.window(512),
    )
    return [
        replace(sliding if kind == SLIDING else usual, rope=rope)
        for kind, rope in zip(types, rotations, strict=True)
    ]


def _rotations(s: Settings, types: tuple[str, ...]) -> list[RopeParameters]:
    bases, shares = _by_layer(s, "rope_theta", 1e4), _by_layer(s, "partial_rotary_factors", 1.0)
    stretched = s.names("yarn_only_types") or (FULL, SLIDING)
    own = ("rope_theta", "partial_rotary_factor")  # keys that are set per layer
    scaling = {name: each for name, each in s.scaling().values.items() if name not in own}
    rotations = []
    for kind, theta, share in zip(types, bases, shares, strict=True):
        one = s.changed(
            rope_theta=theta,
            partial_rotary_factor=share,
            rope_scaling=scaling if kind in stretched else None,
            rope_parameters=None,
        )
        rotations.append(one.rope(partial=1.0))
    return rotations


def _blocks(s: Settings) -> list[FeedForward]:
    """Return the feed-forward block of each layer."""
    limits, shared_limits = (
        _by_layer(s, name, 0.0) for name in ("swiglu_limits", "swiglu_limits_shared")
    )
    sparse = _sparse(s)
    router = SigmoidRouter(
        s.integer("moe_top_k", default=8),
        normalise=s.flag("norm_expert_weight", default=True),
        scale=s.number("moe_router_scaling_factor", default=3.0),
    )
    experts = softmax_mixture(
        s.changed(
            num_experts=s.integer("moe_num_experts", default=288),
            num_experts_per_tok=router.k,
            moe_intermediate_size=s.integer("moe_intermediate_size", default=1280),
        ),
        router=router,
        shared_width=s.integer("share_expert_dim", default=1280),
    )
    dense = mlp(s, bias=False)
    return [
        replace(experts, limit=limit, shared_limit=shared)
        if index in sparse
        else replace(dense, limit=shared)
        for index, (limit, shared) in enumerate(zip(limits, shared_limits, strict=True))
    ]


def _sparse(s: Settings) -> tuple[int, ...]:
    """Return the indices of layers with experts, from a list or a comma-separated text."""
    if not s.has("moe_layers_enum"):
        return tuple(range(1, s.integer("num_hidden_layers")))
    if isinstance(s.value("moe_layers_enum"), list):
        return s.integers("moe_layers_enum")
    parts = [part.strip() for part in s.word("moe_layers_enum").split(",")]
    if any(part and not part.isdigit() for part in parts):
        raise s.error("moe_layers_enum", "which is not a list of layers")
    return tuple(int(part) for part in parts if part)


def _by_layer(s: Settings, name: str, default: float) -> list[float]:
    """Return one number per layer. The file has one for all, one for each, or more than needed.

    Null and absent numbers are `default`.
    """
    count, value = s.integer("num_hidden_layers"), s.value(name)
    if not isinstance(value, list):
        return [s.number(name, default=default, minimum=0.0)] * count
    if any(isinstance(each, bool) or not isinstance(each, int | float | None) for each in value):
        raise s.error(name, "which is not a list of numbers")
    numbers = [default if each is None else float(each) for each in value[:count]]
    if any(not 0 <= each < 1e38 for each in numbers):
        raise s.error(name, "of which one is out of bounds")
    return numbers + [default] * (count - len(numbers))


_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")


def _as_converted(weights: Weights, count: int) -> Weights:
    """Convert published weights as MLX conversions do: rename, and add one to norms.

    Layers for multi-token prediction are dropped.
    """
    published = any(".moe." in name for name in weights)
    ready: Weights = {}
    for name, array in weights.items():
        layer = _LAYER.match(name)
        if ".mtp" in name or (layer is not None and int(layer[1]) >= count):
            continue
        if published and name.endswith("norm.weight"):
            array = array + 1.0
        renamed = name.replace(".moe.gate.", ".mlp.gate.")
        renamed = renamed.replace(".moe.router_bias", ".mlp.router_bias")
        renamed = renamed.replace(".moe.", ".mlp.experts.")
        if ".mlp.share_expert." not in renamed:
            renamed = renamed.replace(".share_expert.", ".mlp.share_expert.")
        ready[renamed] = array
    return ready


FAMILIES = (
    Family("step3p5", "Step 3.5 Flash", step3p5),
    Family("step3p7", "Step 3.7, text", step3p7),
)
