"""A small configuration or more of each described family, as its `config.json` has it."""

from __future__ import annotations

from typing import Any

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
MIXED = [SLIDING, FULL, SLIDING]


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


def _config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type} | SHAPE | ROPE | changes


def _grouped() -> dict[str, Any]:
    return ROUTED | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}


def _latent(**changes: Any) -> dict[str, Any]:
    """Multi-head latent attention; the head sizes are no multiples of each other."""
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


def _hybrid(**changes: Any) -> dict[str, Any]:
    """Granite 4's layers, one of three with attention."""
    return {
        "layer_types": [LINEAR, FULL, LINEAR],
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 24,
        "mamba_n_groups": 1,
        "embedding_multiplier": 6.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    } | changes


def _multiplied(**changes: Any) -> dict[str, Any]:
    """Falcon-H1's layers, each multiplier another number."""
    return {
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 24,
        "embedding_multiplier": 4.0,
        "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.9, 0.6],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.6, 0.5, 0.7, 0.8, 0.4],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.9,
    } | changes


def _state_spaces(**changes: Any) -> dict[str, Any]:
    """Nemotron-H's layers: each is one block."""
    return {
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    } | changes


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _config("llama", **LLAMA3),
    "llama-dynamic": _config(
        "llama",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "mistral": _config("mistral", sliding_window=32, head_dim=16),
    "mixtral": _config("mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "mixtral-window": _config("mixtral", num_local_experts=4, sliding_window=24, head_dim=16),
    "ministral": _config("ministral", sliding_window=24, layer_types=MIXED, head_dim=16),
    "qwen2": _config("qwen2", tie_word_embeddings=True),
    "qwen2-window": _config(
        "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen2_moe": _config(
        "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=48, mlp_only_layers=[1]
    ),
    "qwen2_moe-sparse": _config("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=64),
    "qwen2_moe-normalised": _config(
        "qwen2_moe",
        **EXPERTS,
        shared_expert_intermediate_size=48,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        qkv_bias=False,
    ),
    "qwen3": _config("qwen3", head_dim=16),
    "qwen3_moe": _config("qwen3_moe", **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3_next": _config(
        "qwen3_next",
        **EXPERTS,
        head_dim=16,
        shared_expert_intermediate_size=64,
        num_hidden_layers=4,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "gemma": _config("gemma", head_dim=16, hidden_act="gelu_pytorch_tanh"),
    "gemma2": _config(
        "gemma2",
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3_text": _config(
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
    "phi": _config("phi", rope_parameters=ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}),
    "phi-qk-norm": _config("phi", qk_layernorm=True),
    "phi3": _config("phi3"),
    "phi3-window": _config("phi3", sliding_window=24),
    "phi3-longrope": _config("phi3", original_max_position_embeddings=32, **_longrope(8)),
    "phimoe": _config("phimoe", num_local_experts=4, attention_bias=True, lm_head_bias=True),
    "olmo2": _config("olmo2"),
    "olmo3": _config(
        "olmo3",
        sliding_window=24,
        layer_types=MIXED,
        rope_parameters={FULL: YARN, SLIDING: ROPE["rope_parameters"]},
    ),
    "olmoe": _config("olmoe", **EXPERTS, clip_qkv=1.5),
    "glm": _config("glm", head_dim=16),
    "glm4": _config("glm4", head_dim=16),
    "glm4_moe": _config("glm4_moe", **ROUTED, use_qk_norm=True, head_dim=16),
    "glm4_moe-groups": _config("glm4_moe", **_grouped(), attention_bias=True, head_dim=16),
    "granite": _config(
        "granite",
        embedding_multiplier=6.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "granitemoe": _config(
        "granitemoe",
        num_local_experts=8,
        num_experts_per_tok=2,
        embedding_multiplier=6.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "granitemoeshared": _config(
        "granitemoeshared",
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        attention_multiplier=0.25,
    ),
    "granitemoehybrid": _config(
        "granitemoehybrid", **_hybrid(num_local_experts=0, shared_intermediate_size=128)
    ),
    "granitemoehybrid-experts": _config(
        "granitemoehybrid",
        **_hybrid(num_local_experts=8, num_experts_per_tok=2, mamba_n_groups=2),
        position_embedding_type="rope",
    ),
    "cohere": _config("cohere", logit_scale=0.5),
    "cohere-qk-norm": _config("cohere", logit_scale=0.5, use_qk_norm=True),
    "cohere2": _config("cohere2", logit_scale=0.5, sliding_window=24, layer_types=MIXED),
    "smollm3": _config("smollm3", no_rope_layers=[1, 0, 1]),
    "smollm3-window": _config(
        "smollm3", no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=24
    ),
    "seed_oss": _config("seed_oss", head_dim=16, attention_out_bias=True),
    "arcee": _config("arcee", mlp_bias=True),
    "exaone4": _config(
        "exaone4",
        sliding_window=24,
        sliding_window_pattern="LG",
        layer_types=MIXED,
        head_dim=16,
    ),
    "exaone4-full": _config("exaone4", sliding_window=None, layer_types=[FULL] * 3, head_dim=16),
    "ernie4_5": _config("ernie4_5", head_dim=16, use_bias=True),
    "ernie4_5_moe": _config(
        "ernie4_5_moe",
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
    ),
    "hunyuan_v1_dense": _config(
        "hunyuan_v1_dense",
        head_dim=16,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 100.0,
            "factor": 1.0,
        },
    ),
    "hunyuan_v1_moe": _config("hunyuan_v1_moe", num_experts=8, moe_topk=2, head_dim=16),
    "helium": _config("helium", head_dim=16),
    "starcoder2": _config("starcoder2", sliding_window=24),
    "stablelm": _config("stablelm", use_qkv_bias=True),
    "stablelm-parallel": _config("stablelm", use_parallel_residual=True, qk_layernorm=True),
    "nemotron": _config("nemotron", mlp_bias=True, attention_bias=True),
    "nemotron_h": _config(
        "nemotron_h", **_state_spaces(layers_block_type=[LINEAR, "mlp", FULL, LINEAR])
    ),
    "nemotron_h-experts": _config(
        "nemotron_h",
        **_state_spaces(
            layers_block_type=[LINEAR, "moe", FULL, "moe"],
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=2.5,
            moe_latent_size=48,
        ),
    ),
    "mamba2": _config(
        "mamba2",
        num_heads=8,
        head_dim=16,
        state_size=24,
        n_groups=2,
        use_bias=True,
        max_position_embeddings=None,
    ),
    "falcon_h1": _config("falcon_h1", **_multiplied()),
    "falcon_h1-norm": _config(
        "falcon_h1",
        **_multiplied(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2),
        tie_word_embeddings=True,
    ),
    "jamba": _config(
        "jamba",
        num_experts=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_offset=0,
        mamba_d_state=8,
        mamba_dt_rank=6,
    ),
    "llama4_text": _config(
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
    "llama4_text-several": _config(
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
    "ministral3": _config(
        "ministral3",
        head_dim=16,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    ),
    "glm_moe_dsa": _config(
        "glm_moe_dsa",
        **_latent(norm_topk_prob=True, q_lora_rank=24),
        index_topk=512,
        index_n_heads=2,
        index_head_dim=16,
    ),
    "deepseek_v32": _config(
        "deepseek_v32",
        **_latent(n_routed_experts=16, n_group=4, topk_group=2, norm_topk_prob=True),
        q_lora_rank=24,
        index_topk=512,
        index_n_heads=2,
        index_head_dim=16,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "minimax_m2": _config(
        "minimax_m2", num_local_experts=8, num_experts_per_tok=2, head_dim=16, rotary_dim=8
    ),
    "deepseek_v2": _config("deepseek_v2", **_latent(), q_lora_rank=None),
    "deepseek_v2-groups": _config(
        "deepseek_v2",
        **_latent(n_routed_experts=16, n_group=4, topk_group=2),
        topk_method="group_limited_greedy",
        q_lora_rank=24,
    ),
    "deepseek_v3": _config(
        "deepseek_v3",
        **_latent(n_routed_experts=16, n_group=4, topk_group=2, norm_topk_prob=True),
        q_lora_rank=24,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "glm4_moe_lite": _config(
        "glm4_moe_lite", **_latent(norm_topk_prob=True), q_lora_rank=24, rope_interleave=True
    ),
    "lfm2": _config(
        "lfm2",
        layer_types=["conv", FULL, "conv"],
        conv_L_cache=3,
        block_dim=64,
        block_ff_dim=128,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        conv_bias=False,
        norm_eps=1e-5,
    ),
    "lfm2_moe": _config(
        "lfm2_moe",
        **EXPERTS,
        layer_types=["conv", "conv", FULL],
        conv_L_cache=4,
        conv_bias=True,
        num_dense_layers=1,
        norm_eps=1e-5,
        routed_scaling_factor=1.5,
    ),
    "gpt_oss": _config(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=24,
        layer_types=MIXED,
        rope_parameters=YARN | {"truncate": False},
    ),
    "dots1": _config("dots1", **ROUTED, head_dim=16, sliding_window=24, max_window_layers=2),
}

HELD_AGAINST_MLX_LM: dict[str, dict[str, Any]] = {
    "minicpm": _config(
        "minicpm",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        dim_model_base=16,
        scale_depth=1.4,
        scale_emb=12.0,
        tie_word_embeddings=False,
    ),
    "bailing_moe": _config(
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
"""Of families that transformers does not have."""
