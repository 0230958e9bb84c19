"""A small configuration or more of each described family, as its `config.json` has it."""

from __future__ import annotations

from typing import Any

from tests.support.family_shapes import (
    EXPERTS,
    FULL,
    LLAMA3,
    MIXED,
    ROPE,
    ROUTED,
    SLIDING,
    YARN,
    config,
)
from tests.support.hybrid_families import HYBRIDS


def _longrope(pairs: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
            "long_factor": [1.5 + 0.5 * i for i in range(pairs)],
            "original_max_position_embeddings": 32,
            **more,
        }
    }


def _grouped() -> dict[str, Any]:
    return ROUTED | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}


def _latent(**changes: Any) -> dict[str, Any]:
    """Return multi-head latent attention; the head sizes are no multiples of each other."""
    return (
        ROUTED
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "norm_topk_prob": False,
        }
        | changes
    )


_SCALED = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
"""Ministral 3's: queries grow with their position."""

_BY_TYPE: dict[str, Any] = {
    FULL: {"rope_type": "default", "rope_theta": 50000.0},
    SLIDING: ROPE["rope_parameters"],
}

# Of many heads, since a key that all heads score 0 is no better than another such.
_INDEXER = {"index_topk": 12, "index_n_heads": 8, "index_head_dim": 16}

_PLACED: dict[str, Any] = {
    "vocab_size": 256,
    "n_embd": 64,
    "n_inner": 128,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "n_ctx": 512,
    "scale_attn_weights": True,
    "layer_norm_epsilon": 1e-5,
}
"""GPT-2's keys; its positions are learned."""


CONFIGS: dict[str, dict[str, Any]] = HYBRIDS | {
    "llama": config("llama", **LLAMA3),
    "llama-dynamic": config(
        "llama",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "cwm": config("cwm", head_dim=16, sliding_window=24, **LLAMA3),
    "mistral": config("mistral", sliding_window=32, head_dim=16),
    "mixtral": config("mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "mixtral-window": config("mixtral", num_local_experts=4, sliding_window=24, head_dim=16),
    "ministral": config("ministral", sliding_window=24, layer_types=MIXED, head_dim=16),
    "qwen2": config("qwen2", tie_word_embeddings=True),
    "qwen2-window": config(
        "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen2_moe": config(
        "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=48, mlp_only_layers=[1]
    ),
    "qwen2_moe-sparse": config("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=64),
    "qwen2_moe-normalised": config(
        "qwen2_moe",
        **EXPERTS,
        shared_expert_intermediate_size=48,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        qkv_bias=False,
    ),
    "qwen3": config("qwen3", head_dim=16),
    "qwen3_moe": config("qwen3_moe", **EXPERTS, head_dim=16, norm_topk_prob=True),
    "gemma": config("gemma", head_dim=16, hidden_act="gelu_pytorch_tanh"),
    "gemma2": config(
        "gemma2",
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3n_text": config(
        "gemma3n_text",
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        sliding_window=8,
        num_kv_shared_layers=2,
        head_dim=16,
        intermediate_size=[128, 96, 128, 128],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=200,
        activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0],
        altup_num_inputs=3,
        laurel_rank=8,
        hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 50000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3_text": config(
        "gemma3_text",
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=20,
        layer_types=MIXED,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "vaultgemma": config(
        "vaultgemma",
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma4_unified_text": config(
        "gemma4_unified_text",
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=32,
        hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=30.0,
        use_bidirectional_attention="vision",
        tie_word_embeddings=True,
        rope_parameters={
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 50000.0,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "phi": config("phi", rope_parameters=ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}),
    "phi-qk-norm": config("phi", qk_layernorm=True),
    "phi3": config("phi3"),
    "phi3-window": config("phi3", sliding_window=24),
    "phi3-longrope": config("phi3", original_max_position_embeddings=32, **_longrope(8)),
    "phimoe": config("phimoe", num_local_experts=4, attention_bias=True, lm_head_bias=True),
    "olmo2": config("olmo2"),
    "olmo3": config(
        "olmo3",
        sliding_window=24,
        layer_types=MIXED,
        rope_parameters={FULL: YARN, SLIDING: ROPE["rope_parameters"]},
    ),
    "olmoe": config("olmoe", **EXPERTS, clip_qkv=1.5),
    "glm": config("glm", head_dim=16),
    "glm4": config("glm4", head_dim=16),
    "glm4_moe": config("glm4_moe", **ROUTED, use_qk_norm=True, head_dim=16),
    "glm4_moe-groups": config("glm4_moe", **_grouped(), attention_bias=True, head_dim=16),
    "granite": config(
        "granite",
        embedding_multiplier=6.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "granitemoe": config(
        "granitemoe",
        num_local_experts=8,
        num_experts_per_tok=2,
        embedding_multiplier=6.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "granitemoeshared": config(
        "granitemoeshared",
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        attention_multiplier=0.25,
    ),
    "cohere": config("cohere", logit_scale=0.5),
    "cohere-qk-norm": config("cohere", logit_scale=0.5, use_qk_norm=True),
    "cohere2": config("cohere2", logit_scale=0.5, sliding_window=24, layer_types=MIXED),
    "cohere2_moe": config(
        "cohere2_moe",
        num_experts=4,
        num_shared_experts=2,
        head_dim=16,
        logit_scale=0.5,
        sliding_window=24,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING, FULL, SLIDING],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        prefix_dense_intermediate_size=96,
    ),
    "cohere2_moe-sigmoid": config(
        "cohere2_moe",
        num_experts=4,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid",
        rms_norm_eps=1e-5,
        head_dim=16,
        logit_scale=0.5,
        layer_types=MIXED,
        mlp_layer_types=["sparse"] * 3,
        sliding_window=24,
    ),
    "minicpm3": config(
        "minicpm3",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        dim_model_base=16,
        scale_emb=6.0,
        tie_word_embeddings=True,
    ),
    "smollm3": config("smollm3", no_rope_layers=[1, 0, 1]),
    "smollm3-window": config(
        "smollm3", no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=24
    ),
    "seed_oss": config("seed_oss", head_dim=16, attention_out_bias=True),
    "arcee": config("arcee", mlp_bias=True),
    "apertus": config("apertus", head_dim=16, hidden_act="xielu", **LLAMA3),
    "mellum": config(
        "mellum",
        **EXPERTS,
        head_dim=16,
        sliding_window=24,
        layer_types=MIXED,
        rope_parameters=_BY_TYPE,
    ),
    "mellum-dense": config(
        "mellum",
        **EXPERTS,
        head_dim=16,
        mlp_layer_types=["sparse", "dense", "sparse"],
        layer_types=[FULL] * 3,
        rope_parameters=_BY_TYPE,
    ),
    "laguna": config(
        "laguna",
        **EXPERTS,
        head_dim=16,
        sliding_window=24,
        layer_types=MIXED,
        num_attention_heads_per_layer=[4, 2, 4],
        shared_expert_intermediate_size=48,
        moe_routed_scaling_factor=2.5,
        moe_router_logit_softcapping=2.0,
        rope_parameters=_BY_TYPE | {FULL: YARN | {"partial_rotary_factor": 0.5}},
    ),
    "laguna-elements": config(
        "laguna",
        **EXPERTS,
        head_dim=16,
        gating="per-element",
        attention_bias=True,
        layer_types=[FULL] * 3,
        rope_parameters=_BY_TYPE,
    ),
    "mimo_v2_flash": config(
        "mimo_v2_flash",
        **ROUTED | {"n_shared_experts": None, "n_group": 2, "topk_group": 1},
        head_dim=24,
        v_head_dim=16,
        num_key_value_heads=1,
        sliding_window=24,
        layer_types=[FULL, SLIDING, SLIDING],
        rope_parameters={
            kind: each | {"partial_rotary_factor": 0.334} for kind, each in _BY_TYPE.items()
        },
    ),
    "olmo": config("olmo", clip_qkv=1.5),
    "gpt_neox": config("gpt_neox", hidden_act="gelu", num_key_value_heads=4, intermediate_size=256),
    "gpt_neox-serial": config(
        "gpt_neox", use_parallel_residual=False, attention_bias=False, num_key_value_heads=4
    ),
    "afmoe": config(
        "afmoe",
        **EXPERTS,
        head_dim=16,
        sliding_window=24,
        layer_types=MIXED,
        num_dense_layers=1,
        num_shared_experts=2,
        route_scale=2.5,
        mup_enabled=True,
    ),
    "exaone": config("exaone", **LLAMA3),
    "exaone4": config(
        "exaone4",
        sliding_window=24,
        sliding_window_pattern="LG",
        layer_types=MIXED,
        head_dim=16,
    ),
    "exaone4-full": config("exaone4", sliding_window=None, layer_types=[FULL] * 3, head_dim=16),
    "exaone_moe": config(
        "exaone_moe",
        **EXPERTS,
        sliding_window=24,
        sliding_window_pattern="LG",
        layer_types=MIXED,
        head_dim=16,
        num_shared_experts=2,
        routed_scaling_factor=2.0,
    ),
    "solar_open": config(
        "solar_open",
        **ROUTED | {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
        head_dim=16,
        attention_bias=True,
    ),
    "ernie4_5": config("ernie4_5", head_dim=16, use_bias=True),
    "ernie4_5_moe": config(
        "ernie4_5_moe",
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
    ),
    "hunyuan_v1_dense": config(
        "hunyuan_v1_dense",
        head_dim=16,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 100.0,
            "factor": 1.0,
        },
    ),
    "hunyuan_v1_moe": config("hunyuan_v1_moe", num_experts=8, moe_topk=2, head_dim=16),
    "hy_v3": config(
        "hy_v3",
        **EXPERTS,
        head_dim=16,
        num_shared_experts=2,
        router_scaling_factor=2.5,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "helium": config("helium", head_dim=16),
    "iquestcoder": config("iquestcoder", head_dim=24),
    "gpt2": _PLACED | {"model_type": "gpt2", "n_inner": None},
    "gpt2-scaled": _PLACED
    | {
        "model_type": "gpt2",
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "gpt_bigcode": _PLACED | {"model_type": "gpt_bigcode"},
    "dbrx": {
        "model_type": "dbrx",
        "vocab_size": 256,
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "starcoder2": config("starcoder2", sliding_window=24),
    "stablelm": config("stablelm", use_qkv_bias=True),
    "stablelm-parallel": config("stablelm", use_parallel_residual=True, qk_layernorm=True),
    "nemotron": config("nemotron", mlp_bias=True, attention_bias=True),
    "llama4_text": config(
        "llama4_text",
        head_dim=16,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_hidden_layers=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=24,
        floor_scale=16,
        **LLAMA3,
    ),
    "llama4_text-several": config(
        "llama4_text",
        head_dim=16,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=40,
        attn_temperature_tuning=False,
        use_qk_norm=False,
    ),
    "ministral3": config(
        "ministral3",
        head_dim=16,
        rope_parameters=_SCALED,
    ),
    "mistral4": config("mistral4", **_latent(q_lora_rank=24), rope_parameters=_SCALED),
    "mistral4-groups": config(
        "mistral4",
        **_latent(n_routed_experts=16, n_group=4, topk_group=2, norm_topk_prob=True),
        q_lora_rank=None,
        attention_bias=True,
        rope_parameters=_SCALED | {"partial_rotary_factor": 8 / 24},
    ),
    "glm_moe_dsa": config(
        "glm_moe_dsa",
        **_latent(norm_topk_prob=True, q_lora_rank=24),
        **_INDEXER,
    ),
    "glm_moe_dsa-shared": config(
        "glm_moe_dsa",
        **_latent(norm_topk_prob=True, q_lora_rank=24),
        **_INDEXER,
        indexer_types=["full", "shared", "full"],
    ),
    "deepseek_v32": config(
        "deepseek_v32",
        **_latent(n_routed_experts=16, n_group=4, topk_group=2, norm_topk_prob=True),
        q_lora_rank=24,
        **_INDEXER,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "hy_v4": config(
        "hy_v4",
        **_latent(norm_topk_prob=True, q_lora_rank=24, n_shared_experts=1),
        **_INDEXER,
        indexer_types=["full", "shared", "full"],
        hc_mult=3,
        swiglu_limit=0.7,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "minimax_m2": config(
        "minimax_m2", num_local_experts=8, num_experts_per_tok=2, head_dim=16, rotary_dim=8
    ),
    "deepseek_v2": config("deepseek_v2", **_latent(), q_lora_rank=None),
    "deepseek_v2-groups": config(
        "deepseek_v2",
        **_latent(n_routed_experts=16, n_group=4, topk_group=2),
        topk_method="group_limited_greedy",
        q_lora_rank=24,
    ),
    "deepseek_v3": config(
        "deepseek_v3",
        **_latent(n_routed_experts=16, n_group=4, topk_group=2, norm_topk_prob=True),
        q_lora_rank=24,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "glm4_moe_lite": config(
        "glm4_moe_lite", **_latent(norm_topk_prob=True), q_lora_rank=24, rope_interleave=True
    ),
    "longcat_flash": {
        "model_type": "longcat_flash",
        **ROPE,
        "vocab_size": 256,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "head_dim": 8,
        "n_routed_experts": 6,
        "zero_expert_num": 4,
        "moe_topk": 3,
        "routed_scaling_factor": 2.5,
    },
    "youtu": config(
        "youtu",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        tie_word_embeddings=True,
    ),
    "gpt_oss": config(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=24,
        layer_types=MIXED,
        rope_parameters=YARN | {"truncate": False},
    ),
    "dots1": config("dots1", **ROUTED, head_dim=16, sliding_window=24, max_window_layers=2),
}

HELD_AGAINST_MLX_LM: dict[str, dict[str, Any]] = {
    "internlm2": config("internlm2", rms_norm_eps=1e-5, rope_theta=10000.0, bias=True),
    "internlm3": config(
        "internlm3", rms_norm_eps=1e-5, rope_theta=10000.0, bias=True, qkv_bias=True
    ),
    "minicpm": config(
        "minicpm",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        dim_model_base=16,
        scale_depth=1.4,
        scale_emb=12.0,
        tie_word_embeddings=False,
    ),
    "step3p5": config(
        "step3p5",
        head_dim=16,
        num_key_value_heads=None,
        num_attention_groups=2,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING, SLIDING, FULL, FULL],
        sliding_window=24,
        rope_theta=[50000.0, 10000.0, 10000.0, 50000.0, 50000.0],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5, 0.5],
        yarn_only_types=[FULL],
        rope_parameters=None,
        rope_scaling=LLAMA3["rope_parameters"],
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 3},
        moe_num_experts=8,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=48,
        moe_layers_enum="1,3",
        swiglu_limits=[0.0, 0.5, 0.0, None],
        swiglu_limits_shared=[0.4, 0.0, 0.3, 0.6],
    ),
    "mimo": config("mimo", rms_norm_eps=1e-5, rope_theta=10000.0),
    "telechat3": config("telechat3", rms_norm_eps=1e-5, rope_theta=10000.0),
    "bailing_moe": config(
        "bailing_moe",
        **EXPERTS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        num_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        use_qkv_bias=True,
    ),
}
"""Configurations of families that transformers does not have."""
