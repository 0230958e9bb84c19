"""Random Llamas as an MLX folder of 4 bits and as GGUF files: the same shapes, no training.

Codes are drawn and scales are constant, since no product's speed depends on them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from gguf_file import SCALE, GGUFFile, Kind

GROUP = 64
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with a tied head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        """Return GGUF's name, columns and depth of each product, by Hugging Face's name in a
        layer.
        """
        kv_width = self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": ("attn_q", self.hidden, self.hidden),
            "self_attn.k_proj": ("attn_k", kv_width, self.hidden),
            "self_attn.v_proj": ("attn_v", kv_width, self.hidden),
            "self_attn.o_proj": ("attn_output", self.hidden, self.hidden),
            "mlp.gate_proj": ("ffn_gate", self.intermediate, self.hidden),
            "mlp.up_proj": ("ffn_up", self.intermediate, self.hidden),
            "mlp.down_proj": ("ffn_down", self.hidden, self.intermediate),
        }


SHAPES = {
    "225M": Shape(1024, 16, 16, 8, 2880, 32768),
    "1B": Shape(2048, 16, 32, 8, 8192, 128256),  # Llama 3.2 1B
}


def write_mlx(folder: Path, shape: Shape) -> None:
    """A folder as mlx-lm's quantiser writes it, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weights: dict[str, mx.array] = {}

    def add(name: str, columns: int, depth: int) -> None:
        codes = rng.integers(0, 1 << 32, (columns, depth // 8), dtype=np.uint32)
        scales = mx.full((columns, depth // GROUP), SCALE, dtype=mx.bfloat16)
        weights[f"{name}.weight"] = mx.array(codes)
        weights[f"{name}.scales"], weights[f"{name}.biases"] = scales, scales * -7.5

    add("model.embed_tokens", shape.vocab, shape.hidden)
    ones = mx.ones(shape.hidden, dtype=mx.bfloat16)
    weights["model.norm.weight"] = ones
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, (_, columns, depth) in shape.matrices().items():
            add(prefix + name, columns, depth)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = ones
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "quantization": {"group_size": GROUP, "bits": 4},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_gguf(path: Path, shape: Shape, kind: Kind) -> None:
    """A file for llama.cpp, without a vocabulary."""
    file = GGUFFile(path, "llama", kind)
    writer = file.writer
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    file.matrix("token_embd", shape.vocab, shape.hidden)
    file.norms("", shape.hidden, "output_norm")
    for layer in range(shape.layers):
        for name, columns, depth in shape.matrices().values():
            file.matrix(f"blk.{layer}.{name}", columns, depth)
        file.norms(f"blk.{layer}.", shape.hidden, "attn_norm", "ffn_norm")
    file.close()
