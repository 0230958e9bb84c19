"""Converts a GGUF architecture's metadata to the `config.json` that its family reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.weights.gguf import changes, configs, hybrids, layered
from quire.models.weights.gguf.changes import Change
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.keys import Config, all_of, has, layers, one_of
from quire.models.weights.gguf.rotation import rope_parameters


@dataclass(frozen=True)
class Architecture:
    """How GGUF files of an architecture differ from the family's own files.

    Attributes:
        config: returns the architecture's own configuration keys.
        change: undoes the converter's changes to tensors.
        names: module names that differ from `names.BLOCK`.
        parameters: returns tensors that the file stores as metadata.
        wide: whether activations exceed float16's range.
    """

    config: Callable[[GGUF], Config]
    change: Change = changes.unchanged
    names: Mapping[str, str] = field(default_factory=dict)
    parameters: Callable[[GGUF], dict[str, mx.array]] = changes.no_parameters
    wide: bool = False


def architecture_of(gguf: GGUF) -> Architecture:
    """Return the architecture of a file.

    Raises:
        ModelError: the architecture is not supported.
    """
    known = ARCHITECTURES.get(gguf.architecture)
    if reason := REFUSED.get(gguf.architecture):
        raise ModelError(
            f"{gguf.files[0]}: GGUF architecture {gguf.architecture!r} is not supported: {reason}"
        )
    if known is None:
        names = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{gguf.files[0]}: GGUF architecture {gguf.architecture!r} is not supported "
            f"(known: {names})"
        )
    return known


def config_of(gguf: GGUF) -> Config:
    """Return the equivalent of `config.json`.

    Raises:
        ModelError: the architecture is not supported, or a key is missing.
    """
    own = architecture_of(gguf).config(gguf)
    return _common(gguf, own.get("num_attention_heads")) | own


def _common(gguf: GGUF, heads: int | None) -> Config:
    """Return the keys of all architectures.

    Args:
        heads: number of query heads, of an architecture whose layers may differ in it.
    """
    eps = gguf.get("attention.layer_norm_rms_epsilon", gguf.get("attention.layer_norm_epsilon"))
    if heads is None:
        heads = one_of(gguf, "attention.head_count")
    hidden = gguf.need("embedding_length")
    return {
        "vocab_size": gguf.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden,
        "intermediate_size": max(all_of(gguf, "feed_forward_length", 0)),
        "num_hidden_layers": layers(gguf),
        "num_attention_heads": heads,
        "num_key_value_heads": max(all_of(gguf, "attention.head_count_kv", heads)),
        "head_dim": gguf.get("attention.key_length", hidden // (heads or 1)),
        "max_position_embeddings": gguf.need("context_length"),
        "rope_parameters": rope_parameters(gguf),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"), eps),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": has(gguf, "attn_q.bias") or has(gguf, "attn_qkv.bias"),
        "mlp_bias": has(gguf, "ffn_up.bias"),
    }


_HALVES, _LESS_ONE = changes.neighbours_to_halves, changes.less_one
_FUSED = {"ffn_up": "mlp.gate_up_proj"}
_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = _FUSED | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

_GEMMA4 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

_STATES = changes.state_space
_NEMOTRON_H = Architecture(
    hybrids.nemotron_h, names=hybrids.NEMOTRON_H, change=changes.state_space_and_pairs
)

_AFMOE = {"attn_gate": "self_attn.g_proj", "ffn_norm": "pre_feedforward_layernorm"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture(configs.afmoe, names=_AFMOE),
    "apertus": Architecture(
        configs.plain("apertus", hidden_act="xielu"), parameters=changes.activations
    ),
    "arcee": Architecture(configs.plain("arcee", hidden_act="relu2"), change=_HALVES),
    "bailingmoe": Architecture(configs.bailing_moe, change=_HALVES),
    "chatglm": Architecture(configs.plain("glm"), names=_FUSED),
    "cohere2": Architecture(configs.cohere2),
    "cohere2moe": Architecture(configs.cohere2_moe),
    "command-r": Architecture(configs.command_r),
    "deepseek2": Architecture(configs.deepseek2),
    "dots1": Architecture(configs.dots1),
    "ernie4_5": Architecture(configs.ernie),
    "ernie4_5-moe": Architecture(configs.ernie_moe),
    "exaone": Architecture(configs.plain("exaone")),
    "exaone-moe": Architecture(configs.exaone_moe),
    "exaone4": Architecture(configs.exaone4),
    "falcon-h1": Architecture(hybrids.falcon_h1, names=hybrids.FALCON_H1, change=_STATES),
    "gemma": Architecture(configs.gemma, change=_LESS_ONE, wide=True),
    "gemma-embedding": Architecture(
        configs.embedding_gemma, change=_LESS_ONE, names=_SANDWICH, wide=True
    ),
    "gemma2": Architecture(configs.gemma2, change=_LESS_ONE, names=_SANDWICH, wide=True),
    "gemma3": Architecture(configs.gemma3, change=_LESS_ONE, names=_SANDWICH, wide=True),
    "gemma4": Architecture(configs.gemma4, names=_GEMMA4, wide=True),
    "glm4": Architecture(configs.plain("glm4"), names=_GLM4),
    "glm4moe": Architecture(configs.glm4_moe),
    "gpt-oss": Architecture(configs.gpt_oss),
    "gptneox": Architecture(configs.gpt_neox),
    "granite": Architecture(configs.granite, change=_HALVES),
    "granitehybrid": Architecture(
        hybrids.granite_hybrid, names=hybrids.MAMBA2, change=changes.state_space_and_pairs
    ),
    "granitemoe": Architecture(configs.granite, change=_HALVES),
    "hunyuan-dense": Architecture(configs.plain("hunyuan_v1_dense")),
    "hunyuan-moe": Architecture(configs.hunyuan_moe),
    "internlm2": Architecture(configs.plain("llama"), change=_HALVES),
    "jamba": Architecture(hybrids.jamba, names=hybrids.MAMBA, change=changes.delta_net),
    "kimi-linear": Architecture(
        hybrids.kimi_linear, names=hybrids.KIMI_LINEAR, change=changes.channel_delta
    ),
    "lfm2": Architecture(configs.lfm2, change=changes.channels_last),
    "lfm2moe": Architecture(configs.lfm2, change=changes.channels_last),
    "llama": Architecture(configs.llama, change=_HALVES),
    "llama4": Architecture(configs.llama4),
    "mamba": Architecture(
        hybrids.mamba, names=hybrids.MAMBA | {"attn_norm": "norm"}, change=changes.delta_net
    ),
    "mamba2": Architecture(
        hybrids.mamba2, names=hybrids.MAMBA2 | {"attn_norm": "norm"}, change=_STATES
    ),
    "mimo2": Architecture(layered.mimo_v2),
    "minicpm": Architecture(configs.minicpm, change=_HALVES),
    "minimax-m2": Architecture(configs.minimax_m2),
    "mistral3": Architecture(configs.mistral3, change=_HALVES),
    "mistral4": Architecture(configs.mistral4),
    "nemotron": Architecture(configs.plain("nemotron", hidden_act="relu2"), change=_LESS_ONE),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "olmo": Architecture(configs.olmo, change=_HALVES),
    "olmo2": Architecture(configs.olmo2),
    "olmoe": Architecture(configs.olmoe),
    "phi2": Architecture(configs.phi),
    "phi3": Architecture(configs.phi3, names=_FUSED),
    "phimoe": Architecture(configs.phimoe),
    "qwen2": Architecture(configs.plain("qwen2")),
    "qwen2moe": Architecture(configs.qwen2_moe),
    "qwen2vl": Architecture(configs.plain("qwen2")),
    "qwen3": Architecture(configs.plain("qwen3")),
    "qwen35": Architecture(configs.qwen3_5, names=_DELTA_NET, change=changes.delta_net_by_key_head),
    "qwen35moe": Architecture(
        configs.qwen3_5, names=_DELTA_NET, change=changes.delta_net_by_key_head
    ),
    "qwen3moe": Architecture(configs.qwen3_moe),
    "qwen3next": Architecture(configs.qwen3_next, names=_DELTA_NET, change=changes.delta_net),
    "qwen3vl": Architecture(configs.plain("qwen3")),
    "qwen3vlmoe": Architecture(configs.qwen3_moe),
    "seed_oss": Architecture(configs.seed_oss),
    "smollm3": Architecture(configs.plain("smollm3"), change=_HALVES),
    "stablelm": Architecture(configs.stablelm),
    "starcoder2": Architecture(configs.starcoder2),
    "step35": Architecture(layered.step3p5, names={"attn_gate": "self_attn.g_proj"}),
}

REFUSED: Mapping[str, str] = {
    "clip": "this is an encoder of images or sound (mmproj); name the model's own file, which is "
    "served without it",
    "glm-dsa": "its indexer's tensors are not read; use the safetensors",
    "gemma3n": "its tensors are not read; use the safetensors",
    "bailingmoe2": "its tensors are not read; use the safetensors",
    "minicpm3": "its tensors are not read; use the safetensors",
    "deepseek": "DeepSeek V2 and later are served, as 'deepseek2'",
}
"""Architectures similar to supported ones, with the reason why they are refused."""
