"""From a GGUF architecture's metadata to the `config.json` that its family reads.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What a file does
not say is what llama.cpp takes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import ModelError
from quire.models.gguf.file import GGUF
from quire.models.gguf.rotation import rope_parameters
from quire.models.settings import FULL, SLIDING

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture differ from the family's own.

    Attributes:
        config: what its configuration has beside what all have.
        permuted: rows of queries and keys lie as Llama's first code had them: the two of a rotated
            pair are neighbours.
        plus_one: norms are stored with the one added that the family's files leave out.
        names: where modules have other names than in `names.BLOCK`.
        wide: activations leave float16's range.
    """

    config: Callable[[GGUF], Config]
    permuted: bool = False
    plus_one: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    wide: bool = False


def architecture_of(gguf: GGUF) -> Architecture:
    """Raises: ModelError: an architecture that maps onto no family here."""
    known = ARCHITECTURES.get(gguf.architecture)
    if known is None:
        names = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{gguf.files[0]}: GGUF architecture {gguf.architecture!r} is not supported "
            f"(known: {names})"
        )
    return known


def config_of(gguf: GGUF) -> Config:
    """What `config.json` would say.

    Raises:
        ModelError: an unknown architecture, or a key is missing.
    """
    own = architecture_of(gguf).config(gguf)
    return _common(gguf) | own


def layers(gguf: GGUF) -> int:
    """How many layers there are, without those that guess several tokens ahead."""
    return int(gguf.need("block_count")) - int(gguf.get("nextn_predict_layers", 0))


def _common(gguf: GGUF) -> Config:
    eps = gguf.get("attention.layer_norm_rms_epsilon", gguf.get("attention.layer_norm_epsilon"))
    heads = _one(gguf, "attention.head_count")
    hidden = gguf.need("embedding_length")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.files[0]}: no tensor 'token_embd.weight'")
    return {
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _one(gguf, "feed_forward_length", 0),
        "num_hidden_layers": layers(gguf),
        "num_attention_heads": heads,
        "num_key_value_heads": max(_all(gguf, "attention.head_count_kv", heads)),
        "head_dim": gguf.get("attention.key_length", hidden // heads),
        "max_position_embeddings": gguf.need("context_length"),
        "rope_parameters": rope_parameters(gguf),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"), eps),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": _has(gguf, "attn_q.bias") or _has(gguf, "attn_qkv.bias"),
        "mlp_bias": _has(gguf, "ffn_up.bias"),
    }


def _all(gguf: GGUF, key: str, default: Any = None) -> list[Any]:
    """A key that may say something for each layer."""
    value = gguf.get(key, default) if default is not None else gguf.need(key)
    return value if isinstance(value, list) else [value]


def _one(gguf: GGUF, key: str, default: Any = None) -> Any:
    """The same where it has to be alike in all."""
    values = _all(gguf, key, default)
    if len(set(values)) > 1:
        raise ModelError(f"{gguf.files[0]}: {key} = {values!r}: one for all layers is supported")
    return values[0]


def _has(gguf: GGUF, name: str) -> bool:
    return any(f"blk.{layer}.{name}" in gguf.tensors for layer in range(layers(gguf)))


def _window(gguf: GGUF) -> Config:
    return {"sliding_window": gguf.get("attention.sliding_window") or None}


def _types(gguf: GGUF, every: int) -> Config:
    """Layers with a window, but for each `every`th, where the file does not list them."""
    pattern = gguf.get("attention.sliding_window_pattern", every)
    count, window = layers(gguf), gguf.get("attention.sliding_window")
    if not isinstance(pattern, list):
        pattern = [bool((index + 1) % pattern) for index in range(count)]
    types = [SLIDING if slides and window else FULL for slides in pattern[:count]]
    return {"sliding_window": window or None, "layer_types": types}


def _experts(gguf: GGUF, count: str = "num_experts") -> Config:
    width = gguf.get("expert_feed_forward_length", gguf.get("feed_forward_length"))
    return {
        count: gguf.need("expert_count"),
        "num_experts_per_tok": gguf.need("expert_used_count"),
        "moe_intermediate_size": width,
    }


def _routed(gguf: GGUF) -> Config:
    """DeepSeek's and their heirs' experts."""
    return _experts(gguf, "n_routed_experts") | {
        "n_shared_experts": gguf.get("expert_shared_count", 0),
        "routed_scaling_factor": gguf.get("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": gguf.get("expert_weights_norm", False),
        "first_k_dense_replace": gguf.get("leading_dense_block_count", 0),
        "n_group": gguf.get("expert_group_count", 1) or 1,
        "topk_group": gguf.get("expert_group_used_count", 1) or 1,
        "num_nextn_predict_layers": gguf.get("nextn_predict_layers", 0),
    }


def _plain(model_type: str, **more: Any) -> Callable[[GGUF], Config]:
    return lambda gguf: {"model_type": model_type} | more


def _llama(gguf: GGUF) -> Config:
    if gguf.get("expert_count"):
        experts = _experts(gguf, "num_local_experts")
        return {"model_type": "mixtral"} | experts | _window(gguf)
    if window := _window(gguf)["sliding_window"]:
        return {"model_type": "mistral", "sliding_window": window}
    return {"model_type": "llama"}


def _qwen2_moe(gguf: GGUF) -> Config:
    return _experts(gguf) | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": gguf.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": _has(gguf, "attn_q.bias"),
    }


def _qwen3_moe(gguf: GGUF) -> Config:
    return _experts(gguf) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def _olmoe(gguf: GGUF) -> Config:
    experts = _experts(gguf)
    width = {"intermediate_size": experts["moe_intermediate_size"]}
    clip = {"clip_qkv": gguf.get("attention.clamp_kqv")}
    return experts | width | clip | {"model_type": "olmoe", "norm_topk_prob": False}


def _olmo2(gguf: GGUF) -> Config:
    if not gguf.get("attention.sliding_window"):
        return {"model_type": "olmo2"}
    plain = {"rope_type": "default", "rope_theta": rope_parameters(gguf)["rope_theta"]}
    ropes = {"rope_parameters": {FULL: rope_parameters(gguf), SLIDING: plain}}
    return {"model_type": "olmo3"} | _types(gguf, 4) | ropes


def _gemma(gguf: GGUF) -> Config:
    return {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}


def _scalar(gguf: GGUF, largest: int) -> Config:
    """What queries are scaled by. Files do not say; the largest model alone has its own."""
    if layers(gguf) == largest:
        value = gguf.need("embedding_length") // _one(gguf, "attention.head_count")
    else:
        value = gguf.need("attention.key_length")
    return {"query_pre_attn_scalar": value, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(gguf: GGUF) -> Config:
    caps = {
        "attn_logit_softcapping": gguf.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": gguf.get("final_logit_softcapping", 30.0),
    }
    return {"model_type": "gemma2"} | _scalar(gguf, 46) | caps | _types(gguf, 2)


def _gemma3(gguf: GGUF) -> Config:
    local = {"rope_type": "default", "rope_theta": gguf.get("rope.freq_base_swa", 1e4)}
    more = {
        "model_type": "gemma3_text",
        "rope_parameters": {FULL: rope_parameters(gguf, theta=1e6), SLIDING: local},
        "final_logit_softcapping": gguf.get("final_logit_softcapping"),
    }
    return more | _scalar(gguf, 62) | _types(gguf, 6)


def _phi(gguf: GGUF) -> Config:
    # The file says four times the hidden size, whatever it is.
    width = gguf.tensors["blk.0.ffn_up.weight"].shape[0]
    return {"model_type": "phi", "hidden_act": "gelu_new", "intermediate_size": width}


def _phi3(gguf: GGUF) -> Config:
    return {"model_type": "phi3"} | _window(gguf)


def _phimoe(gguf: GGUF) -> Config:
    more = {"model_type": "phimoe", "lm_head_bias": "output.bias" in gguf.tensors}
    experts = _experts(gguf, "num_local_experts")
    width = {"intermediate_size": experts["moe_intermediate_size"]}
    return experts | width | more | _window(gguf)


def _glm4_moe(gguf: GGUF) -> Config:
    normed = {"use_qk_norm": _has(gguf, "attn_q_norm.weight")}
    return {"model_type": "glm4_moe"} | _routed(gguf) | normed


def _granite(gguf: GGUF) -> Config:
    more = {
        "model_type": "granite",
        "embedding_multiplier": gguf.get("embedding_scale", 1.0),
        "residual_multiplier": gguf.get("residual_scale", 1.0),
        "logits_scaling": gguf.get("logit_scale", 1.0),
    }
    if gguf.get("attention.scale"):
        more["attention_multiplier"] = gguf.get("attention.scale")
    if not gguf.get("expert_count"):
        return more
    shared = {"shared_intermediate_size": gguf.get("expert_shared_feed_forward_length", 0)}
    return more | _experts(gguf, "num_local_experts") | shared | {"model_type": "granitemoe"}


def _command_r(gguf: GGUF) -> Config:
    return {
        "model_type": "cohere",
        "logit_scale": gguf.need("logit_scale"),
        "use_qk_norm": _has(gguf, "attn_q_norm.weight"),
    }


def _cohere2(gguf: GGUF) -> Config:
    return {"model_type": "cohere2", "logit_scale": gguf.need("logit_scale")} | _types(gguf, 4)


def _seed_oss(gguf: GGUF) -> Config:
    return {"model_type": "seed_oss", "attention_out_bias": _has(gguf, "attn_output.bias")}


def _exaone4(gguf: GGUF) -> Config:
    return {"model_type": "exaone4"} | _types(gguf, 4)


def _ernie(gguf: GGUF) -> Config:
    return {"model_type": "ernie4_5", "use_bias": _has(gguf, "attn_q.bias")}


def _ernie_moe(gguf: GGUF) -> Config:
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": gguf.need("expert_count"),
        "moe_k": gguf.need("expert_used_count"),
        "moe_intermediate_size": gguf.need("expert_feed_forward_length"),
        "moe_num_shared_experts": gguf.get("expert_shared_count", 0),
        "moe_layer_start_index": gguf.get("leading_dense_block_count", 1),
        "moe_layer_interval": gguf.get("interleave_moe_layer_step", 1),
    }


def _starcoder2(gguf: GGUF) -> Config:
    bias = _has(gguf, "attn_q.bias")
    return {"model_type": "starcoder2", "use_bias": bias, "hidden_act": "gelu_pytorch_tanh"}


def _stablelm(gguf: GGUF) -> Config:
    return {
        "model_type": "stablelm",
        "use_qkv_bias": _has(gguf, "attn_q.bias"),
        "qk_layernorm": _has(gguf, "attn_q_norm.weight"),
        "use_parallel_residual": not _has(gguf, "ffn_norm.weight"),
    }


def _minimax_m2(gguf: GGUF) -> Config:
    experts = _experts(gguf, "num_local_experts")
    return experts | {
        "model_type": "minimax_m2",
        "intermediate_size": experts["moe_intermediate_size"],
        "rotary_dim": gguf.need("rope.dimension_count"),
    }


def _deepseek2(gguf: GGUF) -> Config:
    sigmoid = gguf.get("expert_gating_func") == 2 or _has(gguf, "exp_probs_b.bias")
    rotated = gguf.need("rope.dimension_count")
    more = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "q_lora_rank": gguf.get("attention.q_lora_rank"),
        "kv_lora_rank": gguf.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": gguf.get("attention.key_length_mla", gguf.need("attention.key_length"))
        - rotated,
        "v_head_dim": gguf.get("attention.value_length_mla", gguf.need("attention.value_length")),
    }
    routed = _routed(gguf)
    if not sigmoid and routed["n_group"] > 1:
        more["topk_method"] = "group_limited_greedy"
    return routed | more


def _gpt_oss(gguf: GGUF) -> Config:
    experts = _experts(gguf, "num_local_experts")
    return (
        experts
        | {
            "model_type": "gpt_oss",
            "intermediate_size": experts["moe_intermediate_size"],
            "rope_parameters": rope_parameters(gguf) | {"truncate": False},
            "attention_bias": True,
        }
        | _types(gguf, 2)
    )


def _dots1(gguf: GGUF) -> Config:
    return {"model_type": "dots1", "sliding_window": None} | _routed(gguf)


def _lfm2(gguf: GGUF) -> Config:
    kinds = [FULL if heads else "conv" for heads in _all(gguf, "attention.head_count_kv")]
    more = {
        "model_type": "lfm2",
        "layer_types": kinds,
        "conv_L_cache": gguf.need("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    if not gguf.get("expert_count"):
        return more
    dense = {"num_dense_layers": gguf.get("leading_dense_block_count", 0)}
    return more | _experts(gguf) | dense | {"model_type": "lfm2_moe"}


def _hunyuan_moe(gguf: GGUF) -> Config:
    return _experts(gguf) | {
        "model_type": "hunyuan_v1_moe",
        "moe_topk": gguf.need("expert_used_count"),
        "num_shared_expert": 1,
        "intermediate_size": gguf.need("expert_shared_feed_forward_length"),
    }


def _minicpm(gguf: GGUF) -> Config:
    hidden, depth = gguf.need("embedding_length"), layers(gguf) ** 0.5
    return {
        "model_type": "minicpm",
        "scale_emb": gguf.get("embedding_scale", 12.0),
        "scale_depth": gguf.get("residual_scale", 1.4 / depth) * depth,
        "dim_model_base": hidden / gguf.get("logit_scale", hidden / 256),
    }


_FUSED = {"ffn_up": "mlp.gate_up_proj"}
_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = _FUSED | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture(_plain("arcee", hidden_act="relu2"), permuted=True),
    "chatglm": Architecture(_plain("glm"), names=_FUSED),
    "cohere2": Architecture(_cohere2),
    "command-r": Architecture(_command_r),
    "deepseek2": Architecture(_deepseek2),
    "dots1": Architecture(_dots1),
    "ernie4_5": Architecture(_ernie),
    "ernie4_5-moe": Architecture(_ernie_moe),
    "exaone4": Architecture(_exaone4),
    "gemma": Architecture(_gemma, plus_one=True, wide=True),
    "gemma2": Architecture(_gemma2, plus_one=True, names=_SANDWICH, wide=True),
    "gemma3": Architecture(_gemma3, plus_one=True, names=_SANDWICH, wide=True),
    "glm4": Architecture(_plain("glm4"), names=_GLM4),
    "glm4moe": Architecture(_glm4_moe),
    "gpt-oss": Architecture(_gpt_oss),
    "granite": Architecture(_granite, permuted=True),
    "granitemoe": Architecture(_granite, permuted=True),
    "hunyuan-dense": Architecture(_plain("hunyuan_v1_dense")),
    "hunyuan-moe": Architecture(_hunyuan_moe),
    "lfm2": Architecture(_lfm2),
    "lfm2moe": Architecture(_lfm2),
    "llama": Architecture(_llama, permuted=True),
    "minicpm": Architecture(_minicpm, permuted=True),
    "minimax-m2": Architecture(_minimax_m2),
    "nemotron": Architecture(_plain("nemotron", hidden_act="relu2"), plus_one=True),
    "olmo2": Architecture(_olmo2),
    "olmoe": Architecture(_olmoe),
    "phi2": Architecture(_phi),
    "phi3": Architecture(_phi3, names=_FUSED),
    "phimoe": Architecture(_phimoe),
    "qwen2": Architecture(_plain("qwen2")),
    "qwen2moe": Architecture(_qwen2_moe),
    "qwen3": Architecture(_plain("qwen3")),
    "qwen3moe": Architecture(_qwen3_moe),
    "seed_oss": Architecture(_seed_oss),
    "smollm3": Architecture(_plain("smollm3"), permuted=True),
    "stablelm": Architecture(_stablelm),
    "starcoder2": Architecture(_starcoder2),
}
