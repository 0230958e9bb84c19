"""Translates GGUF's tensor names to those of this package's modules."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's
    "output": "lm_head",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "exp_probs_b.bias": "mlp.e_score_correction_bias",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
ROTATIONS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Prefixes of tensors that are read as configuration."""
PROJECTIONS = ("dense_2", "dense_3")
"""Linear layers behind pooling, in order, as sentence-transformers numbers them."""


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor; None if it is in no layer."""
    match = _BLOCK.fullmatch(name)
    return None if match is None else int(match[1])


def renamed(name: str, own: Mapping[str, str]) -> str | None:
    """Return the translated name; None if it is unknown.

    Args:
        own: the architecture's own names, without the layer. A name that ends with a kind
            (`.weight`) is a parameter's, any other a module's.
    """
    match = _BLOCK.fullmatch(name)
    prefix, inner = (f"model.layers.{match[1]}.", match[2]) if match else ("", name)
    known = {**(BLOCK if match else WHOLE), **own}
    if inner in known:
        return prefix + known[inner]
    module, _, kind = inner.rpartition(".")
    return f"{prefix}{known[module]}.{kind}" if module in known else None
