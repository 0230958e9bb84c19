"""Configuration keys of each GGUF architecture, besides the common ones.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Absent keys have
llama.cpp's defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.core.values import require
from quire.models.settings import FULL, SLIDING
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.keys import (
    Config,
    all_of,
    experts,
    has,
    layer_types,
    layers,
    one_of,
    routed,
    window,
)
from quire.models.weights.gguf.rotation import proportional, rope_parameters


def plain(model_type: str, **more: Any) -> Callable[[GGUF], Config]:
    return lambda gguf: {"model_type": model_type} | more


def llama(gguf: GGUF) -> Config:
    if gguf.get("expert_count"):
        mixture = experts(gguf, "num_local_experts")
        return {"model_type": "mixtral"} | mixture | window(gguf)
    if gguf.get("attention.sliding_window"):
        return {"model_type": "mistral"} | window(gguf)
    return {"model_type": "llama"}


def qwen2_moe(gguf: GGUF) -> Config:
    return experts(gguf) | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": gguf.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": has(gguf, "attn_q.bias"),
    }


def qwen3_moe(gguf: GGUF) -> Config:
    return experts(gguf) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def olmoe(gguf: GGUF) -> Config:
    mixture = experts(gguf)
    width = {"intermediate_size": mixture["moe_intermediate_size"]}
    clip = {"clip_qkv": gguf.get("attention.clamp_kqv")}
    return mixture | width | clip | {"model_type": "olmoe", "norm_topk_prob": False}


def olmo(gguf: GGUF) -> Config:
    return {"model_type": "olmo", "clip_qkv": gguf.get("attention.clamp_kqv")}


def olmo2(gguf: GGUF) -> Config:
    if not gguf.get("attention.sliding_window"):
        return {"model_type": "olmo2"}
    plain = {"rope_type": "default", "rope_theta": rope_parameters(gguf)["rope_theta"]}
    ropes = {"rope_parameters": {FULL: rope_parameters(gguf), SLIDING: plain}}
    return {"model_type": "olmo3"} | layer_types(gguf, 4) | ropes


def gemma(gguf: GGUF) -> Config:
    return {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}


def _scalar(gguf: GGUF, largest: int) -> Config:
    """Return the query scale. Files omit it; only the largest model's differs."""
    if layers(gguf) == largest:
        value = gguf.need("embedding_length") // one_of(gguf, "attention.head_count")
    else:
        value = gguf.need("attention.key_length")
    return {"query_pre_attn_scalar": value, "hidden_activation": "gelu_pytorch_tanh"}


def gemma2(gguf: GGUF) -> Config:
    caps = {
        "attn_logit_softcapping": gguf.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": gguf.get("final_logit_softcapping", 30.0),
    }
    return {"model_type": "gemma2"} | _scalar(gguf, 46) | caps | layer_types(gguf, 2)


def gemma3(gguf: GGUF) -> Config:
    local = {"rope_type": "default", "rope_theta": gguf.get("rope.freq_base_swa", 1e4)}
    more = {
        "model_type": "gemma3_text",
        "rope_parameters": {FULL: rope_parameters(gguf, theta=1e6), SLIDING: local},
        "final_logit_softcapping": gguf.get("final_logit_softcapping"),
    }
    return more | _scalar(gguf, 62) | layer_types(gguf, 6)


def embedding_gemma(gguf: GGUF) -> Config:
    """Return the keys of EmbeddingGemma: Gemma 3 whose rows see both sides."""
    return gemma3(gguf) | {"use_bidirectional_attention": True}


def gemma4(gguf: GGUF) -> Config:
    sliding, shared = layer_types(gguf, 6), gguf.get("attention.shared_kv_layers", 0)
    heads = all_of(gguf, "attention.head_count_kv")
    by_kind = dict(zip(sliding["layer_types"], heads * (layers(gguf) // len(heads)), strict=True))
    widths = all_of(gguf, "feed_forward_length")
    own = gguf.get("embedding_length_per_layer_input", 0)
    values = [f"blk.{i}.attn_v.weight" in gguf.tensors for i in range(layers(gguf) - shared)]
    config = sliding | {
        "model_type": "gemma4_text",
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "head_dim": gguf.need("attention.key_length_swa"),
        "global_head_dim": gguf.need("attention.key_length"),
        "num_key_value_heads": by_kind.get(SLIDING, heads[-1]),
        "num_global_key_value_heads": by_kind.get(FULL, heads[-1]),
        "attention_k_eq_v": not all(values),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": own,
        "final_logit_softcapping": gguf.get("final_logit_softcapping"),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": gguf.get("rope.freq_base_swa", 1e4)},
            FULL: proportional(gguf),
        },
    }
    if own:
        rows = gguf.tensor("per_layer_token_embd.weight").shape[0]
        config["vocab_size_per_layer_input"] = rows
    if gguf.get("expert_count"):
        mixture = experts(gguf)
        config |= mixture | {"enable_moe_block": True}
        config["top_k_experts"] = mixture["num_experts_per_tok"]
    return config


def phi(gguf: GGUF) -> Config:
    # The file always states four times the hidden size.
    width = gguf.tensor("blk.0.ffn_up.weight").shape[0]
    return {"model_type": "phi", "hidden_act": "gelu_new", "intermediate_size": width}


def phi3(gguf: GGUF) -> Config:
    return {"model_type": "phi3"} | window(gguf)


def phimoe(gguf: GGUF) -> Config:
    more = {"model_type": "phimoe", "lm_head_bias": "output.bias" in gguf.tensors}
    mixture = experts(gguf, "num_local_experts")
    width = {"intermediate_size": mixture["moe_intermediate_size"]}
    return mixture | width | more | window(gguf)


def glm4_moe(gguf: GGUF) -> Config:
    normed = {"use_qk_norm": has(gguf, "attn_q_norm.weight")}
    return {"model_type": "glm4_moe"} | routed(gguf) | normed


def granite(gguf: GGUF) -> Config:
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
    return more | experts(gguf, "num_local_experts") | shared | {"model_type": "granitemoe"}


def command_r(gguf: GGUF) -> Config:
    return {
        "model_type": "cohere",
        "logit_scale": gguf.need("logit_scale"),
        "use_qk_norm": has(gguf, "attn_q_norm.weight"),
    }


def cohere2(gguf: GGUF) -> Config:
    return {"model_type": "cohere2", "logit_scale": gguf.need("logit_scale")} | layer_types(gguf, 4)


def seed_oss(gguf: GGUF) -> Config:
    return {"model_type": "seed_oss", "attention_out_bias": has(gguf, "attn_output.bias")}


def exaone4(gguf: GGUF) -> Config:
    return {"model_type": "exaone4"} | layer_types(gguf, 4)


def exaone_moe(gguf: GGUF) -> Config:
    mixture = routed(gguf)
    shared = {"num_shared_experts": mixture["n_shared_experts"]}
    count = {"num_experts": mixture["n_routed_experts"]}
    return mixture | shared | count | {"model_type": "exaone_moe"} | layer_types(gguf, 4)


def afmoe(gguf: GGUF) -> Config:
    mixture = routed(gguf)
    more = {
        "model_type": "afmoe",
        "num_experts": mixture["n_routed_experts"],
        "num_shared_experts": mixture["n_shared_experts"],
        "num_dense_layers": mixture["first_k_dense_replace"],
        "route_norm": bool(mixture["norm_topk_prob"]),
        "route_scale": mixture["routed_scaling_factor"],
        "mup_enabled": True,
    }
    return experts(gguf) | more | layer_types(gguf, 4)


def cohere2_moe(gguf: GGUF) -> Config:
    mixture = routed(gguf)
    more = {
        "model_type": "cohere2_moe",
        "num_experts": mixture["n_routed_experts"],
        "num_shared_experts": mixture["n_shared_experts"],
        "intermediate_size": mixture["moe_intermediate_size"],
        "prefix_dense_intermediate_size": max(all_of(gguf, "feed_forward_length")),
        "expert_selection_fn": "softmax" if gguf.get("expert_gating_func") == 1 else "sigmoid",
        "rms_norm_eps": gguf.get("attention.layer_norm_rms_epsilon"),
        "logit_scale": gguf.need("logit_scale"),
    }
    kept = {key: mixture[key] for key in ("first_k_dense_replace", "num_experts_per_tok")}
    flag = {"norm_topk_prob": bool(mixture["norm_topk_prob"])}
    return kept | flag | more | layer_types(gguf, 4)


def ernie(gguf: GGUF) -> Config:
    return {"model_type": "ernie4_5", "use_bias": has(gguf, "attn_q.bias")}


def ernie_moe(gguf: GGUF) -> Config:
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": gguf.need("expert_count"),
        "moe_k": gguf.need("expert_used_count"),
        "moe_intermediate_size": gguf.need("expert_feed_forward_length"),
        "moe_num_shared_experts": gguf.get("expert_shared_count", 0),
        "moe_layer_start_index": gguf.get("leading_dense_block_count", 1),
        "moe_layer_interval": gguf.get("interleave_moe_layer_step", 1),
    }


def gpt_neox(gguf: GGUF) -> Config:
    return {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "use_parallel_residual": bool(gguf.need("use_parallel_residual")),
    }


def starcoder2(gguf: GGUF) -> Config:
    bias = has(gguf, "attn_q.bias")
    return {"model_type": "starcoder2", "use_bias": bias, "hidden_act": "gelu_pytorch_tanh"}


def stablelm(gguf: GGUF) -> Config:
    return {
        "model_type": "stablelm",
        "use_qkv_bias": has(gguf, "attn_q.bias"),
        "qk_layernorm": has(gguf, "attn_q_norm.weight"),
        "use_parallel_residual": not has(gguf, "ffn_norm.weight"),
    }


def minimax_m2(gguf: GGUF) -> Config:
    mixture = experts(gguf, "num_local_experts")
    return mixture | {
        "model_type": "minimax_m2",
        "intermediate_size": mixture["moe_intermediate_size"],
        "rotary_dim": gguf.need("rope.dimension_count"),
    }


def latent(gguf: GGUF) -> Config:
    """Return the keys of latent attention. The file may count its heads as one, as wide as the
    latent.
    """
    rotated = gguf.need("rope.dimension_count")
    wide, values = (
        gguf.get(f"attention.{part}_length_mla") or gguf.need(f"attention.{part}_length")
        for part in ("key", "value")
    )
    return {
        "q_lora_rank": gguf.get("attention.q_lora_rank"),
        "kv_lora_rank": gguf.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": wide - rotated,
        "v_head_dim": values,
    }


def deepseek2(gguf: GGUF) -> Config:
    sigmoid = gguf.get("expert_gating_func") == 2 or has(gguf, "exp_probs_b.bias")
    more = {"model_type": "deepseek_v3" if sigmoid else "deepseek_v2"} | latent(gguf)
    mixture = routed(gguf)
    if not sigmoid and mixture["n_group"] > 1:
        more["topk_method"] = "group_limited_greedy"
    return mixture | more


def gpt_oss(gguf: GGUF) -> Config:
    mixture = experts(gguf, "num_local_experts")
    return (
        mixture
        | {
            "model_type": "gpt_oss",
            "intermediate_size": mixture["moe_intermediate_size"],
            "rope_parameters": rope_parameters(gguf) | {"truncate": False},
            "attention_bias": True,
        }
        | layer_types(gguf, 2)
    )


def dots1(gguf: GGUF) -> Config:
    return {"model_type": "dots1", "sliding_window": None} | routed(gguf)


def lfm2(gguf: GGUF) -> Config:
    kinds = [FULL if heads else "conv" for heads in all_of(gguf, "attention.head_count_kv")]
    more = {
        "model_type": "lfm2",
        "layer_types": kinds,
        "conv_L_cache": gguf.need("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    if not gguf.get("expert_count"):
        return more
    dense = {"num_dense_layers": gguf.get("leading_dense_block_count", 0)}
    return more | experts(gguf) | dense | {"model_type": "lfm2_moe"}


def _delta_net(gguf: GGUF) -> Config:
    values = gguf.need("ssm.time_step_rank")
    kinds = [f"blk.{index}.ssm_a" in gguf.tensors for index in range(layers(gguf))]
    config = {
        "linear_num_key_heads": gguf.need("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": gguf.need("ssm.state_size"),
        "linear_value_head_dim": gguf.need("ssm.inner_size") // values,
        "linear_conv_kernel_dim": gguf.need("ssm.conv_kernel"),
        "layer_types": ["linear_attention" if delta else FULL for delta in kinds],
    }
    if gguf.get("expert_count"):
        shared = gguf.need("expert_shared_feed_forward_length")
        config |= experts(gguf) | {"shared_expert_intermediate_size": shared}
    return config


def qwen3_5(gguf: GGUF) -> Config:
    rope = rope_parameters(gguf)
    if sections := gguf.get("rope.dimension_sections"):
        rope["mrope_section"] = sections[:3]
    kind = "qwen3_5_moe_text" if gguf.get("expert_count") else "qwen3_5_text"
    return _delta_net(gguf) | {"model_type": kind, "rope_parameters": rope}


def qwen3_next(gguf: GGUF) -> Config:
    return _delta_net(gguf) | {"model_type": "qwen3_next", "norm_topk_prob": True}


def minicpm(gguf: GGUF) -> Config:
    hidden, depth = gguf.need("embedding_length"), layers(gguf) ** 0.5
    return {
        "model_type": "minicpm",
        "scale_emb": gguf.get("embedding_scale", 12.0),
        "scale_depth": gguf.get("residual_scale", 1.4 / depth) * depth,
        "dim_model_base": hidden / gguf.get("logit_scale", hidden / 256),
    }


def llama4(gguf: GGUF) -> Config:
    """Return Llama 4's keys as llama.cpp assumes them: chunks of 8,192 tokens, scaled queries, and
    norms except in the largest model.
    """
    window = gguf.get("attention.sliding_window", 8192)
    kinds = [FULL if (i + 1) % 4 == 0 else "chunked_attention" for i in range(layers(gguf))]
    mixture = experts(gguf, "num_local_experts")
    return mixture | {
        "model_type": "llama4_text",
        "intermediate_size": mixture["moe_intermediate_size"],
        "intermediate_size_mlp": gguf.need("feed_forward_length"),
        "interleave_moe_layer_step": gguf.need("interleave_moe_layer_step"),
        "layer_types": kinds if window else [FULL] * layers(gguf),
        "no_rope_layers": [int(not window or kind != FULL) for kind in kinds],
        "attention_chunk_size": 8192 if window else None,
        "use_qk_norm": gguf.need("expert_count") != 128,
    }


def mistral3(gguf: GGUF) -> Config:
    """Return the keys of Ministral 3, or of an older Mistral that comes with a vision encoder."""
    slope = gguf.get("attention.temperature_scale")
    if not slope:
        return {"model_type": "mistral"} | window(gguf)
    rope = rope_parameters(gguf) | {"llama_4_scaling_beta": slope}
    if multiplier := gguf.get("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return {"model_type": "ministral3", "rope_parameters": rope} | window(gguf)


def mistral4(gguf: GGUF) -> Config:
    """Return the keys of Mistral Small 4: DeepSeek's, and the temperature of Ministral 3."""
    trained = gguf.need("context_length")
    rope = {"original_max_position_embeddings": trained, "factor": 1.0} | rope_parameters(gguf)
    rope["llama_4_scaling_beta"] = gguf.get("attention.temperature_scale", 0.0)
    trained = rope["original_max_position_embeddings"]
    grows_after = gguf.get("attention.temperature_length", trained)
    require("attention.temperature_length", grows_after, (trained,), file=gguf.files[0])
    return routed(gguf) | latent(gguf) | {"model_type": "mistral4", "rope_parameters": rope}


def hunyuan_moe(gguf: GGUF) -> Config:
    shared = gguf.tensor("blk.0.ffn_up_shexp.weight").shape[0]
    return experts(gguf) | {
        "model_type": "hunyuan_v1_moe",
        "moe_topk": gguf.need("expert_used_count"),
        "intermediate_size": shared,
        "num_shared_expert": 1,
    }


def bailing_moe(gguf: GGUF) -> Config:
    return experts(gguf) | {
        "model_type": "bailing_moe",
        "head_dim": gguf.get("attention.key_length", gguf.need("rope.dimension_count")),
        "rope_parameters": rope_parameters(gguf) | {"partial_rotary_factor": 1.0},
        "num_shared_experts": gguf.get("expert_shared_count", 0),
        "norm_topk_prob": gguf.get("expert_weights_norm", False),
        "use_qkv_bias": has(gguf, "attn_q.bias"),
        "use_bias": has(gguf, "attn_output.bias"),
    }
