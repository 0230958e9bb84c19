"""The small configurations of families in sizes that CUDA kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.program.programs import CONFIGS

_QUADRUPLED = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "intermediate_size_mlp",
        "prefix_dense_intermediate_size",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "moe_latent_size",
        "routed_expert_hidden_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        "block_dim",
        "block_ff_dim",
        "block_multiple_of",
        "head_dim",
        "global_head_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_head_dim",
        "index_head_dim",
        "mamba_d_ssm",
        "mrope_section",
        "rotary_dim",
        "dim_model_base",
        "n_embd",
        "n_inner",
        "d_model",
        "ffn_hidden_size",
        "expert_ffn_hidden_size",
        "sliding_window",
        "attention_chunk_size",
    }
)
_DOUBLED = frozenset(
    {"mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim", "linear_num_value_heads"}
)
_AS_PUBLISHED = {
    "kv_lora_rank": 512,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mamba_d_state": 128,
    "ssm_state_size": 128,
    "state_size": 16,
    "mamba_dt_rank": 64,
    "time_step_rank": 64,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 64,
}
_OF_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "falcon_mamba": {"time_step_rank": 64},
    "mamba2": {"state_size": 128, "num_heads": 16, "head_dim": 32},
    "mimo_v2_flash": {"head_dim": 192},
    "kimi_linear": {"head_dim": 64},
}


def grown(name: str) -> dict[str, Any]:
    """Return a configuration with the head sizes of published models and four times the width."""
    config = CONFIGS[name]
    return grown_config(config) | dict(_OF_FAMILIES.get(config["model_type"], {}))


def grown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with all sizes grown."""
    return {key: _value(key, value) for key, value in config.items()}


def _value(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return grown_config(value)
    if key in _AS_PUBLISHED and value:
        return _AS_PUBLISHED[key]
    if key in ("short_factor", "long_factor"):
        return [each for each in value for _ in range(4)]
    if key in _DOUBLED:
        return 2 * value
    if key in _QUADRUPLED and value:
        return [4 * each for each in value] if isinstance(value, list) else 4 * value
    return value
