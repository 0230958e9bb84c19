"""A small configuration or more of each family whose layers keep a state."""

from __future__ import annotations

from typing import Any

from tests.support.family_shapes import EXPERTS, FULL, LINEAR, SLIDING, config


def _hybrid(**changes: Any) -> dict[str, Any]:
    """Return Granite 4's layers, one of three with attention."""
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
    """Return Falcon-H1's layers, each multiplier another number."""
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
    """Return Nemotron-H's layers: each is one block."""
    return {
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    } | changes


def _channels(**changes: Any) -> dict[str, Any]:
    """Return Kimi Linear's layers, without what it has no use for: it rotates nothing."""
    own = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    shape = config("kimi_linear", num_key_value_heads=4, moe_intermediate_size=32, **own)
    return {name: value for name, value in shape.items() if name != "rope_parameters"} | changes


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": config(
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
    "kimi_linear": _channels(
        num_hidden_layers=4,
        linear_attn_config={
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 3,
        },
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=2,
        first_k_dense_replace=0,
        moe_renormalize=True,
        mla_use_nope=True,
        head_dim=8,
        model_max_length=512,
    ),
    "kimi_linear-groups": _channels(
        layer_types=[FULL, LINEAR, FULL],
        mlp_layer_types=["sparse", "dense", "sparse"],
        linear_num_heads=2,
        linear_head_dim=16,
        num_local_experts=16,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        q_lora_rank=24,
        attention_bias=True,
        norm_topk_prob=False,
    ),
    "bailing_hybrid": config(
        "bailing_hybrid",
        num_hidden_layers=4,
        layer_group_size=2,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        num_shared_experts=2,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
    "bailing_hybrid-unbounded": config(
        "bailing_hybrid",
        layer_types=[LINEAR, FULL, LINEAR],
        mlp_layer_types=["sparse", "sparse", "dense"],
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        kda_safe_gate=False,
        short_conv_kernel_size=3,
    ),
    "granitemoehybrid": config(
        "granitemoehybrid", **_hybrid(num_local_experts=0, shared_intermediate_size=128)
    ),
    "granitemoehybrid-experts": config(
        "granitemoehybrid",
        **_hybrid(num_local_experts=8, num_experts_per_tok=2, mamba_n_groups=2),
        position_embedding_type="rope",
    ),
    "nemotron_h": config(
        "nemotron_h", **_state_spaces(layers_block_type=[LINEAR, "mlp", FULL, LINEAR])
    ),
    "nemotron_h-experts": config(
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
    "mamba2": config(
        "mamba2",
        num_heads=8,
        head_dim=16,
        state_size=24,
        n_groups=2,
        use_bias=True,
        max_position_embeddings=None,
    ),
    "mamba": config("mamba", state_size=8, time_step_rank=6, max_position_embeddings=None),
    "falcon_mamba": config(
        "falcon_mamba",
        state_size=8,
        expand=16,  # as published, beside another width
        use_bias=True,
        tie_word_embeddings=False,
        max_position_embeddings=None,
    ),
    "falcon_h1": config("falcon_h1", **_multiplied()),
    "falcon_h1-norm": config(
        "falcon_h1",
        **_multiplied(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2),
        tie_word_embeddings=True,
    ),
    "jamba": config(
        "jamba",
        num_experts=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_offset=0,
        mamba_d_state=8,
        mamba_dt_rank=6,
    ),
    "olmo_hybrid": config(
        "olmo_hybrid",
        layer_types=[LINEAR, FULL, LINEAR],
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "olmo_hybrid-unrotated": config(
        "olmo_hybrid",
        layer_types=[LINEAR, LINEAR, FULL],
        linear_key_head_dim=16,
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "lfm2": config(
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
    "lfm2_moe": config(
        "lfm2_moe",
        **EXPERTS,
        layer_types=["conv", "conv", FULL],
        conv_L_cache=4,
        conv_bias=True,
        num_dense_layers=1,
        norm_eps=1e-5,
        routed_scaling_factor=1.5,
    ),
    "lfm3": config(
        "lfm3",
        num_hidden_layers=6,
        head_dim=16,
        rope_parameters=None,
        sliding_window=32,
        conv_L_cache=7,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "lfm3-plain": config(
        "lfm3",
        layer_types=["conv", SLIDING, FULL],
        head_dim=32,
        sliding_window=32,
        conv_L_cache=3,
        conv_bias=True,
        attention_bias=True,
        norm_eps=1e-5,
        use_sandwich_norm=False,
        use_attention_gate=False,
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 5e5},
            SLIDING: {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
}
