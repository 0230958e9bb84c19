"""Settings that a described family does not compute are refused by name, when it is built."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.models.decoder import DecoderModel
from quire.models.registry import build
from quire.models.weights.loader import context_length, trained_length
from tests.support.families import CONFIGS, HELD_AGAINST_MLX_LM
from tests.support.family_shapes import FULL


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "layers_block_type = 'conv'"),
        ("nemotron_h", {"sliding_window": 64}, "sliding_window = 64"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ("mamba2", {"num_heads": 4}, "num_heads"),
        ("jamba", {"hidden_act": "relu6"}, "relu6"),
        ("glm_moe_dsa", {"num_experts": 9}, "num_experts = 9"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("llama4_text", {"no_rope_layers": [1]}, "1 no_rope_layers"),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 3}, "indexer_types"),
        ("glm_moe_dsa", {"index_topk_pattern": "FXF"}, "indexer_types = 'X'"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias = True"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9, where a layer has 8"),
        ("kimi_linear", {"num_experts_per_token": 9}, "num_experts_per_tok = 9"),
        ("afmoe", {"route_norm": False}, "route_norm = False"),
        ("afmoe", {"num_limited_groups": 2}, "num_limited_groups = 2"),
        ("hy_v3", {"qk_norm": False}, "qk_norm = False"),
        ("hy_v3", {"mlp_layer_types": ["sparse"]}, "1 mlp_layer_types for 3 layers"),
        ("exaone_moe", {"is_moe_layer": [True]}, "1 mlp_layer_types for 3 layers"),
        ("exaone_moe", {"is_moe_layer": True}, "is_moe_layer = True"),
        ("exaone_moe", {"mlp_layer_types": ["none"] * 3}, "mlp_layer_types = 'none'"),
        ("mimo_v2_flash", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("apertus", {"post_norm": True}, "post_norm = True"),
        ("laguna", {"gating": "none"}, "gating = 'none'"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer"),
        ("laguna", {"moe_router_score_func": "sqrtsoftplus"}, "moe_router_score_func"),
        ("laguna", {"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled = True"),
        ("laguna", {"qkv_bias": True}, "qkv_bias = True"),
        ("hy_v3", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        ("step3p5", {"moe_layers_enum": [1.5]}, "moe_layers_enum"),
        ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("qwen2", {"num_attention_heads": 3}, "3 attention heads are no multiple of 2"),
        ("step3p5", {"sink": True}, "sink = True"),
        ("step3p5", {"moe_layers_enum": "1,x"}, "moe_layers_enum = '1,x'"),
        ("step3p5", {"swiglu_limits": ["x"]}, "swiglu_limits"),
        ("step3p5", {"rope_theta": [-1.0]}, "rope_theta"),
        ("cohere2_moe", {"expert_selection_fn": "top"}, "expert_selection_fn = 'top'"),
        ("cohere2_moe", {"mlp_layer_types": ["dense"]}, "1 mlp_layer_types for 4 layers"),
        ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("glm4_moe", {"n_group": 3}, "n_routed_experts % n_group = 2"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope = False"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "= 'softmax'"),
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [3, 4], "kda_layers": [1, 2, 4]}},
            r"linear_attn_config.kda_layers = \[1, 2, 4\], which with full_attn_layers is",
        ),
        ("kimi_k3", {"text_config": {"hidden_act": "silu"}}, "hidden_act = 'silu'"),
        ("kimi_linear-groups", {"layer_types": [FULL]}, "1 layer_types for 3 layers"),
        ("bailing_hybrid", {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "architectures = "),
        ("bailing_hybrid", {"group_norm_size": 4}, "group_norm_size = 4"),
        ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora = False"),
        ("bailing_hybrid", {"score_function": "softmax"}, "score_function = 'softmax'"),
        ("bailing_hybrid", {"moe_router_activation_func": "softmax"}, "scoring_func = 'softmax'"),
        ("bailing_hybrid", {"kda_lower_bound": 5.0}, "kda_lower_bound = 5.0, which is not below"),
        ("bailing_hybrid", {"num_hidden_layers": 5}, "num_hidden_layers % layer_group_size = 1"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query = False"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn.name = 'gelu'"),
        (
            "dbrx",
            {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            "ffn_config.moe_normalize_expert_weights = 2.0",
        ),
        ("bailing_moe", {"norm_head": True}, "norm_head = True"),
        ("bailing_moe", {"score_function": "max"}, "score_function = 'max'"),
        ("bailing_moe-2.0", {"n_group": 3}, "num_experts % n_group = 2"),
        ("bailing_moe_linear", {"group_norm_size": 3}, "heads % group_norm_size = 1"),
        ("nemotron-nas", {"block_configs": []}, r"len\(block_configs\) = 0"),
        (
            "nemotron-nas",
            {"block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {"no_op": 1}}]},
            "block_configs.attention.replace_with_linear = True",
        ),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta"),
        ("hy_v4", {"layer_types": ["full_attention"] * 3}, "layer_types = "),
        ("hy_v4", {"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
        ("hy_v4", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("longcat_flash", {"zero_expert_type": "drop"}, "zero_expert_type = 'drop'"),
        ("longcat_flash", {"router_bias": True}, "router_bias = True"),
        ("longcat_flash", {"attention_method": "MHA"}, "attention_method = 'MHA'"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("mimo", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("mistral4", {"n_group": 3}, "n_routed_experts % n_group = 2"),
        (
            "mistral4",
            {"rope_parameters": {"partial_rotary_factor": 0.25, "llama_4_scaling_beta": 0.1}},
            "partial_rotary_factor = 0.25",
        ),
        ("mistral4", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        build((CONFIGS | HELD_AGAINST_MLX_LM)[name] | changes)


def test_step_may_list_its_layers_of_experts() -> None:
    config = HELD_AGAINST_MLX_LM["step3p5"]
    word, listed = build(config), build(config | {"moe_layers_enum": [1, 3]})
    assert isinstance(word, DecoderModel)
    assert isinstance(listed, DecoderModel)
    assert word.description == listed.description


def test_layers_of_experts_by_their_first_key() -> None:
    config = CONFIGS["exaone_moe"]
    types, first = (
        build(config | changes)
        for changes in (
            {"mlp_layer_types": ["dense", "sparse", "dense"]},
            {"is_moe_layer": [False, True, False]},
        )
    )
    assert isinstance(types, DecoderModel)
    assert isinstance(first, DecoderModel)
    assert types.description == first.description


def test_dbrx_has_its_rotary_base_within_the_settings_of_attention() -> None:
    config = CONFIGS["dbrx"]
    model = build(config | {"attn_config": config["attn_config"] | {"rope_theta": 5e5}})
    assert isinstance(model, DecoderModel)
    ((_, rope),) = {mixer.rotation for mixer in model.description.mixers}
    assert rope.rope_theta == 5e5


def test_mimo_as_it_is_published() -> None:
    """The keys are those of Xiaomi's own code, where a window does not count the query."""
    ours = CONFIGS["mimo_v2_flash"]
    left_out = ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window")
    published = {name: value for name, value in ours.items() if name not in left_out} | {
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "sliding_window_size": 23,
        "attention_chunk_size": 23,
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.334,
        "rope_theta": 50000.0,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": 0.707,
    }
    descriptions = [getattr(build(each), "description", None) for each in (ours, published)]
    assert descriptions[0] is not None
    assert descriptions[0] == descriptions[1]


@pytest.mark.parametrize(
    ("name", "changes", "tokens"),
    [
        ("mamba2", {"max_position_embeddings": None}, 1 << 20),
        ("mamba2", {"max_position_embeddings": 2048}, 2048),
        ("kimi_linear", {"max_position_embeddings": None}, 512),
        ("ministral3", {"max_position_embeddings": 64}, 256),
    ],
)
def test_the_context_that_is_offered(name: str, changes: dict[str, Any], tokens: int) -> None:
    assert context_length(CONFIGS[name] | changes) == tokens


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        (None, 64),
        ({"full_attention": {"rope_type": "proportional"}, "sliding_attention": {}}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
    ],
)
def test_the_context_that_was_trained(rope: dict[str, Any] | None, tokens: int) -> None:
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    assert trained_length({"text_config": lengths | {"rope_parameters": rope}}) == tokens
    assert trained_length({"max_position_embeddings": 256}) == 256


@pytest.mark.parametrize("name", ["mistral3", "glm46v", "exaone4_5"])
def test_a_text_that_the_family_does_not_have_is_refused(name: str) -> None:
    text = CONFIGS["mistral"] | {"model_type": "mixtral"}
    with pytest.raises(ModelError, match=r"text_config.model_type = 'mixtral'"):
        build({"model_type": name, "text_config": text})


@pytest.mark.parametrize(("outer", "inner"), [({}, True), ({"tie_word_embeddings": True}, False)])
def test_a_head_is_tied_where_a_part_says_so(outer: dict[str, Any], inner: bool) -> None:
    text = CONFIGS["mistral"] | {"tie_word_embeddings": inner}
    model = build({"model_type": "mistral3", "text_config": text} | outer)
    assert isinstance(model, DecoderModel)
    assert model.description.tied_head


@pytest.mark.parametrize("alias", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v3", "glm4_moe", "qwen3_moe", "dots1"])
def test_a_second_name_with_an_equal_value_passes(name: str, alias: str) -> None:
    """GLM-5.2-NVFP4 has `num_experts` beside `n_routed_experts`."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    count = next(CONFIGS[name][key] for key in names if key in CONFIGS[name])
    build(CONFIGS[name] | {alias: count})
