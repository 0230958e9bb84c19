"""Writes a random GGUF file for llama.cpp of the shape of a folder: `gguf_files.py FOLDER FILE`.

The folder's `config.json` is all that is read: Llama, Gemma 4 and gpt-oss of `shapes.py`. Matrices
are in Q4_0; where the folder has experts in MXFP4, they are in MXFP4 here and others are in Q8_0.
Codes are drawn, scales are constant, and there is no vocabulary. Needs the package `gguf`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from gguf_file import GGUFFile, Kind

_DEVIATIONS = {Kind.Q4_0: 4.6, Kind.Q8_0: 74.0, Kind.MXFP4: 2.9}
"""Deviation of equally frequent codes, so that products of random codes keep activations near 1."""
_DRAWN = 1 << 26
"""Bytes that are drawn; larger tensors repeat them."""


class _File(GGUFFile):
    """A file without a vocabulary, whose tensors repeat what was drawn once."""

    def __init__(self, path: Path, architecture: str, config: dict[str, Any]) -> None:
        super().__init__(path, architecture, Kind.Q4_0, use_temp_file=True)
        self.config = config
        self._drawn = super().codes(_DRAWN)
        writer = self.writer
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_tokenizer_model("no_vocab")

    def codes(self, count: int) -> np.ndarray[Any, Any]:
        return np.resize(self._drawn, count)

    def scale(self, blocks: np.ndarray[Any, Any], kind: Kind, depth: int) -> None:
        step = 1 / (_DEVIATIONS[kind] * math.sqrt(depth))
        if kind is Kind.MXFP4:  # an exponent; codes stand for twice their numbers
            blocks[:, 0] = 127 + round(math.log2(step))
        else:
            blocks[:, :2] = np.frombuffer(np.float16(step).tobytes(), np.uint8)

    def constant(self, name: str, *shape: int, value: float = 0.0) -> None:
        """Add a tensor of float32 that is the same number everywhere."""
        self.floats(name, np.full(shape, value))

    def router(self, name: str, experts: int, depth: int) -> None:
        """Add a router's matrix in float32."""
        drawn = self.random.normal(0, 1 / math.sqrt(depth), (experts, depth))
        self.floats(f"{name}.weight", drawn)

    def attention(self, block: str, kv_heads: int, dim: int, *, values: bool = True) -> None:
        """Add the matrices of a layer's attention; `values`: they are not the keys."""
        hidden, heads = self.config["hidden_size"], self.config["num_attention_heads"]
        self.matrix(f"{block}attn_q", heads * dim, hidden)
        self.matrix(f"{block}attn_k", kv_heads * dim, hidden)
        if values:
            self.matrix(f"{block}attn_v", kv_heads * dim, hidden)
        self.matrix(f"{block}attn_output", hidden, heads * dim)

    def heads(self, kv_heads: int, dim: int, rope_theta: float) -> None:
        """Add the settings of attention whose layers are alike."""
        self.writer.add_head_count_kv(kv_heads)
        self.writer.add_key_length(dim)
        self.writer.add_value_length(dim)
        self.writer.add_rope_dimension_count(dim)
        self.writer.add_rope_freq_base(rope_theta)

    def ends(self) -> None:
        """Add the embedding, a head of its own, and the norm between layers and head."""
        for name in ("token_embd", "output"):
            self.matrix(name, self.config["vocab_size"], self.config["hidden_size"])
        self.norms("", self.config["hidden_size"], "output_norm")


def write_llama(path: Path, config: dict[str, Any]) -> None:
    """Write a Llama with a head of its own."""
    file = _File(path, "llama", config)
    hidden, dim, kv_heads = (
        config[name] for name in ("hidden_size", "head_dim", "num_key_value_heads")
    )
    file.heads(kv_heads, dim, config["rope_theta"])
    file.ends()
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        file.attention(block, kv_heads, dim)
        file.gated(block, config["intermediate_size"], hidden)
        file.norms(block, hidden, "attn_norm", "ffn_norm")
    file.close()


def write_gemma4(path: Path, config: dict[str, Any]) -> None:
    """Write Gemma 4's mixture, whose layers that see everything have keys as values."""
    file = _File(path, "gemma4", config)
    writer, hidden = file.writer, config["hidden_size"]
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    kv_heads = [
        config["num_key_value_heads" if window else "num_global_key_value_heads"]
        for window in windows
    ]
    sizes = [config["head_dim" if window else "global_head_dim"] for window in windows]
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    ropes = config["rope_parameters"]
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["top_k_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name in ("attention.key_length_swa", "attention.value_length_swa"):
        writer.add_uint32(f"gemma4.{name}", config["head_dim"])
    writer.add_uint32("gemma4.rope.dimension_count_swa", config["head_dim"])
    writer.add_float32("gemma4.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    writer.add_array("gemma4.attention.sliding_window_pattern", windows)
    file.matrix("token_embd", config["vocab_size"], hidden)
    file.norms("", hidden, "output_norm")
    file.constant("rope_freqs.weight", config["global_head_dim"] // 2, value=1.0)
    behind = ("post_attention_norm", "post_ffw_norm", "post_ffw_norm_1", "post_ffw_norm_2")
    for layer, (window, own_heads, dim) in enumerate(zip(windows, kv_heads, sizes, strict=True)):
        block = f"blk.{layer}."
        file.attention(block, own_heads, dim, values=window)
        file.norms(block, dim, "attn_q_norm", "attn_k_norm")
        file.norms(block, hidden, "attn_norm", "ffn_norm", "pre_ffw_norm_2", *behind)
        file.gated(block, config["intermediate_size"], hidden)
        file.router(f"{block}ffn_gate_inp", config["num_experts"], hidden)
        file.constant(f"{block}ffn_gate_inp.scale", hidden, value=1.0)
        file.gated(block, config["moe_intermediate_size"], hidden, experts=config["num_experts"])
        file.constant(f"{block}layer_output_scale.weight", 1, value=1.0)
    file.close()


def write_gpt_oss(path: Path, config: dict[str, Any]) -> None:
    """Write gpt-oss: biases on everything, sinks, experts."""
    file = _File(path, "gpt-oss", config)
    writer, hidden = file.writer, config["hidden_size"]
    dim, kv_heads, heads, experts, inner = (
        config[name]
        for name in (
            "head_dim",
            "num_key_value_heads",
            "num_attention_heads",
            "num_local_experts",
            "intermediate_size",
        )
    )
    rope = config["rope_parameters"]
    file.heads(kv_heads, dim, rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(inner)
    packed: Kind | None = None
    if config.get("quantization", {}).get("mode") == "mxfp4":
        packed, file.kind = Kind.MXFP4, Kind.Q8_0
    file.ends()
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        file.attention(block, kv_heads, dim)
        widths = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim, "output": hidden}
        for name, width in widths.items():
            file.constant(f"{block}attn_{name}.bias", width)
        file.constant(f"{block}attn_sinks.weight", heads)
        file.norms(block, hidden, "attn_norm", "post_attention_norm")
        file.router(f"{block}ffn_gate_inp", experts, hidden)
        file.constant(f"{block}ffn_gate_inp.bias", experts)
        file.gated(block, inner, hidden, experts=experts, kind=packed)
        for name, width in {"gate": inner, "up": inner, "down": hidden}.items():
            file.constant(f"{block}ffn_{name}_exps.bias", experts, width)
    file.close()


WRITERS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "llama": write_llama,
    "gemma4_text": write_gemma4,
    "gpt_oss": write_gpt_oss,
}
"""Writers by `model_type`."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    config = json.loads((asked.folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in WRITERS:
        raise SystemExit(f"{kind} is none of {', '.join(WRITERS)}")
    WRITERS[kind](asked.file, config)
