"""GGUF configurations of models with state space layers, alone or beside attention.

A layer's kind follows from its tensors. Sizes of state spaces have the same keys everywhere:
`time_step_rank` is the number of Mamba 2's heads, `inner_size` their total width.
"""

from __future__ import annotations

from quire.core.errors import ModelError
from quire.models.settings import FULL, LINEAR
from quire.models.weights.gguf.configs import granite, latent
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.keys import Config, all_of, experts, has, layers, one_of, routed

MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA2 = MAMBA | {"ssm_dt.bias": "mamba.dt_bias"}
_NORM = "post_attention_layernorm.weight"
FALCON_H1 = MAMBA2 | {"ffn_norm": _NORM, "ffn_norm.weight": _NORM}  # the converter omits ".weight"
NEMOTRON_H = MAMBA2 | {
    "attn_norm": "norm",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}


KIMI_LINEAR = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}


def _layers_with(gguf: GGUF, name: str) -> list[bool]:
    return [f"blk.{index}.{name}" in gguf.tensors for index in range(layers(gguf))]


def _width(gguf: GGUF, *names: str) -> int:
    """Return the number of rows of the first of these matrices that a layer has; 0 if none
    has any.
    """
    for name in names:
        for index in range(layers(gguf)):
            if info := gguf.tensors.get(f"blk.{index}.{name}.weight"):
                return info.shape[-2]
    return 0


def _mamba2(gguf: GGUF) -> Config:
    """Read the configuration of state space layers of Granite 4 and Falcon-H1."""
    heads = gguf.need("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_ssm": gguf.need("ssm.inner_size"),
        "mamba_d_head": gguf.need("ssm.inner_size") // heads,
        "mamba_d_state": gguf.need("ssm.state_size"),
        "mamba_n_groups": gguf.need("ssm.group_count"),
        "mamba_d_conv": gguf.need("ssm.conv_kernel"),
        "mamba_conv_bias": has(gguf, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(gguf, "ssm_in.bias"),
    }


def granite_hybrid(gguf: GGUF) -> Config:
    kinds = ["mamba" if each else "attention" for each in _layers_with(gguf, "ssm_a")]
    rotated = gguf.get("rope.scaling.finetuned", False)
    return (
        granite(gguf)
        | _mamba2(gguf)
        | {
            "model_type": "granitemoehybrid",
            "layer_types": kinds,
            "position_embedding_type": "rope" if rotated else "nope",
            "num_local_experts": gguf.get("expert_count", 0),
            "shared_intermediate_size": _width(gguf, "ffn_up_shexp", "ffn_up"),
        }
    )


def falcon_h1(gguf: GGUF) -> Config:
    """Return Falcon-H1's keys. Its multipliers are already applied to the matrices, including the
    keys'.
    """
    return _mamba2(gguf) | {
        "model_type": "falcon_h1",
        "mamba_rms_norm": has(gguf, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _own_mamba2(gguf: GGUF) -> Config:
    """Read the configuration of state space layers of Mamba 2 and Nemotron-H."""
    return {
        "n_groups": gguf.need("ssm.group_count"),
        "conv_kernel": gguf.need("ssm.conv_kernel"),
        "ssm_state_size": gguf.need("ssm.state_size"),
        "use_conv_bias": has(gguf, "ssm_conv1d.bias"),
        "use_bias": has(gguf, "ssm_in.bias"),
        "layer_norm_epsilon": gguf.need("attention.layer_norm_rms_epsilon"),
    }


def mamba(gguf: GGUF) -> Config:
    """Return the keys of Mamba, or of Falcon Mamba, which normalises steps and vectors."""
    eps = gguf.need("attention.layer_norm_rms_epsilon")
    return {
        "model_type": "falcon_mamba" if gguf.get("ssm.dt_b_c_rms") else "mamba",
        "intermediate_size": gguf.need("ssm.inner_size"),
        "state_size": gguf.need("ssm.state_size"),
        "time_step_rank": gguf.need("ssm.time_step_rank"),
        "conv_kernel": gguf.need("ssm.conv_kernel"),
        "use_conv_bias": has(gguf, "ssm_conv1d.bias"),
        "use_bias": has(gguf, "ssm_in.bias"),
        "layer_norm_epsilon": eps,
        "mixer_rms_eps": eps,
    }


def mamba2(gguf: GGUF) -> Config:
    heads, inner = gguf.need("ssm.time_step_rank"), gguf.need("ssm.inner_size")
    return _own_mamba2(gguf) | {
        "model_type": "mamba2",
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // gguf.need("embedding_length"),
    }


def nemotron_h(gguf: GGUF) -> Config:
    heads = gguf.need("ssm.time_step_rank")
    which = zip(*(_layers_with(gguf, name) for name in _NEMOTRON_KINDS), strict=True)
    config = _own_mamba2(gguf) | {
        "model_type": "nemotron_h",
        "mamba_num_heads": heads,
        "mamba_head_dim": gguf.need("ssm.inner_size") // heads,
        "mamba_proj_bias": has(gguf, "ssm_in.bias"),
        "layers_block_type": [_kind(gguf, found) for found in which],
    }
    if not gguf.get("expert_count"):
        return config
    return (
        config
        | routed(gguf)
        | {
            "moe_shared_expert_intermediate_size": _width(gguf, "ffn_up_shexp"),
            "moe_latent_size": _width(gguf, "ffn_latent_down") or None,
            "mlp_bias": False,
        }
    )


_NEMOTRON_KINDS = {
    "ssm_a": LINEAR,
    "attn_q.weight": FULL,
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
}


def _kind(gguf: GGUF, found: tuple[bool, ...]) -> str:
    kinds = [kind for kind, there in zip(_NEMOTRON_KINDS.values(), found, strict=True) if there]
    if len(kinds) != 1:
        raise ModelError(f"{gguf.files[0]}: a layer of {' and '.join(kinds) or 'nothing'}")
    return kinds[0]


def kimi_linear(gguf: GGUF) -> Config:
    """Return Kimi Linear's keys. Layers with KV heads have attention, the others delta nets."""
    count, mixture = layers(gguf), routed(gguf)
    attends = [bool(heads) for heads in all_of(gguf, "attention.head_count_kv")]
    attends = (attends * count)[:count] if len(attends) == 1 else attends[:count]
    linear = [index + 1 for index, each in enumerate(attends) if not each]
    delta = {
        "full_attn_layers": [index + 1 for index, each in enumerate(attends) if each],
        "kda_layers": linear,
        "num_heads": _width(gguf, "ssm_beta"),
        "head_dim": gguf.need("kda.head_dim"),
        "short_conv_kernel_size": gguf.need("ssm.conv_kernel"),
    }
    more = {
        "model_type": "kimi_linear",
        "num_key_value_heads": one_of(gguf, "attention.head_count"),
        "norm_topk_prob": True,
        "linear_attn_config": delta,
    }
    return mixture | latent(gguf) | more


def jamba(gguf: GGUF) -> Config:
    hidden = gguf.need("embedding_length")
    mixed = _layers_with(gguf, "ffn_gate_inp.weight")
    config = {
        "model_type": "jamba",
        "mamba_expand": gguf.need("ssm.inner_size") // hidden,
        "mamba_d_state": gguf.need("ssm.state_size"),
        "mamba_d_conv": gguf.need("ssm.conv_kernel"),
        "mamba_dt_rank": gguf.need("ssm.time_step_rank"),
        "mamba_conv_bias": has(gguf, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(gguf, "ssm_in.bias"),
        "num_experts": 1,
        **_period(gguf, "attn", _layers_with(gguf, "attn_q.weight")),
    }
    return config | (experts(gguf) | _period(gguf, "expert", mixed) if any(mixed) else {})


def _period(gguf: GGUF, name: str, listed: list[bool]) -> Config:
    """Return the period and the offset of the layers of a kind."""
    found = [index for index, each in enumerate(listed) if each] or [len(listed)]
    every = found[1] - found[0] if len(found) > 1 else len(listed) + 1
    if [index for index in range(len(listed)) if index % every == found[0]] != [
        index for index in found if index < len(listed)
    ]:
        raise ModelError(f"{gguf.files[0]}: layers {found} of kind {name!r} are not periodic")
    return {f"{name}_layer_period": every, f"{name}_layer_offset": found[0]}
