"""GGUF configurations of models whose full and sliding layers differ in their heads.

The file lists the heads of each layer, and whether it has a window.
"""

from __future__ import annotations

from quire.core.errors import ModelError
from quire.models.settings import FULL, SLIDING
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.keys import (
    Config,
    all_of,
    experts,
    has,
    layer_types,
    layers,
    routed,
)
from quire.models.weights.gguf.rotation import rope_parameters

_ROUTER = "ffn_gate_inp.weight"


def mimo_v2(gguf: GGUF) -> Config:
    """Return the keys of MiMo V2 Flash. Values are scaled only if the file says so."""
    kinds = layer_types(gguf, 6)
    heads, _ = _heads(gguf, "attention.head_count", kinds)
    kv_heads, sliding_kv_heads = _heads(gguf, "attention.head_count_kv", kinds)
    full = rope_parameters(gguf)
    sliding = {"rope_type": "default", "rope_theta": gguf.get("rope.freq_base_swa", 1e4)}
    more = {
        "model_type": "mimo_v2_flash",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "swa_num_key_value_heads": sliding_kv_heads,
        "v_head_dim": gguf.need("attention.value_length"),
        "attention_value_scale": gguf.get("attention.value_scale"),
        "add_full_attention_sink_bias": _sinks(gguf, kinds, FULL),
        "add_swa_attention_sink_bias": _sinks(gguf, kinds, SLIDING),
        "mlp_layer_types": ["sparse" if each else "dense" for each in _sparse(gguf)],
        "norm_topk_prob": True,
        "rope_parameters": {
            FULL: full,
            SLIDING: sliding | {"partial_rotary_factor": full["partial_rotary_factor"]},
        },
    }
    return routed(gguf) | kinds | more


def step3p5(gguf: GGUF) -> Config:
    """Return the keys of Step 3.5 Flash. Full layers rotate half as much of a head as sliding ones,
    and only they have frequency factors.
    """
    kinds = layer_types(gguf, 4)
    heads, sliding_heads = _heads(gguf, "attention.head_count", kinds)
    groups, sliding_groups = _heads(gguf, "attention.head_count_kv", kinds)
    slides = [kind == SLIDING for kind in kinds["layer_types"]]
    rope = rope_parameters(gguf)
    theta, sliding_theta = rope.pop("rope_theta"), gguf.get("rope.freq_base_swa", 1e4)
    whole = rope.pop("partial_rotary_factor", 1.0)
    pairs = int(gguf.need("attention.key_length") * whole / 2) // 2
    for factors in ("long_factor", "short_factor"):
        if factors in rope:
            rope[factors] = rope[factors][:pairs]
    sparse = [index for index, each in enumerate(_sparse(gguf)) if each]
    mixture = experts(gguf, "moe_num_experts")
    more = {
        "model_type": "step3p5",
        "num_attention_heads": heads,
        "num_attention_groups": groups,
        "attention_other_setting": {
            "num_attention_heads": sliding_heads,
            "num_attention_groups": sliding_groups,
        },
        "use_head_wise_attn_gate": has(gguf, "attn_gate.weight"),
        "rope_parameters": None,
        "rope_theta": [sliding_theta if each else theta for each in slides],
        "partial_rotary_factors": [whole if each else whole / 2 for each in slides],
        "rope_scaling": rope,
        "yarn_only_types": [FULL],
        "moe_top_k": mixture["num_experts_per_tok"],
        "moe_layers_enum": sparse,
        "moe_router_scaling_factor": gguf.get("expert_weights_scale", 1.0) or 1.0,
        "norm_expert_weight": gguf.get("expert_weights_norm", False),
        "share_expert_dim": gguf.need("expert_shared_feed_forward_length"),
        "swiglu_limits": gguf.get("swiglu_clamp_exp"),
        "swiglu_limits_shared": gguf.get("swiglu_clamp_shexp"),
    }
    return mixture | kinds | more


def _heads(gguf: GGUF, key: str, kinds: Config) -> tuple[int, int]:
    """Return the number of heads of full layers, and of sliding ones.

    Raises:
        ModelError: layers of one kind differ.
    """
    listed, types = all_of(gguf, key), kinds["layer_types"]
    if len(listed) == 1:
        return listed[0], listed[0]
    found = []
    for kind in (FULL, SLIDING):
        own = {count for count, each in zip(listed, types, strict=False) if each == kind}
        if len(own) > 1:
            raise ModelError(
                f"{gguf.files[0]}: {key} = {listed!r}: layers of one kind must have equal heads"
            )
        found.append(min(own, default=listed[0]))
    return found[0], found[1]


def _sinks(gguf: GGUF, kinds: Config, kind: str) -> bool:
    """Return whether layers of a kind have attention sinks."""
    return any(
        f"blk.{index}.attn_sinks.weight" in gguf.tensors
        for index, each in enumerate(kinds["layer_types"])
        if each == kind
    )


def _sparse(gguf: GGUF) -> list[bool]:
    """Return for each layer whether it has experts."""
    return [f"blk.{index}.{_ROUTER}" in gguf.tensors for index in range(layers(gguf))]
