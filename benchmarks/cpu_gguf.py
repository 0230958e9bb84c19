"""Random models as GGUF files that Quire and llama.cpp both read: a mixture, and a hybrid one.

Codes are drawn and scales are constant, as in `cpu_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from cpu_models import CONTEXT
from gguf_file import GGUFFile, Kind

_HIDDEN, _VOCAB, _LAYERS = 1024, 32768, 8


def _tokens() -> list[str]:
    """Return a byte-level vocabulary: 256 bytes as GPT-2 spells them, then tokens that nobody
    writes.
    """
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in kept else next(others)) for byte in range(256)]
    return [*letters, "th", *(f"token{number}" for number in range(257, _VOCAB))]


class _File(GGUFFile):
    """A file with a vocabulary, an embedding that is the head, too, and a last norm."""

    def __init__(self, path: Path, architecture: str, kind: Kind) -> None:
        super().__init__(path, architecture, kind)
        writer = self.writer
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(_HIDDEN)
        writer.add_block_count(_LAYERS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(_VOCAB)
        tokens = _tokens()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(_VOCAB - 1)
        writer.add_rope_freq_base(1e6)
        self.matrix("token_embd", _VOCAB, _HIDDEN)
        self.norms("", _HIDDEN, "output_norm")

    def attention(self, blk: str, heads: int, kv_heads: int, dim: int, *, gated: bool) -> None:
        """Add a layer's attention; `gated`: queries stand beside gates."""
        self.matrix(f"{blk}attn_q", heads * dim * (2 if gated else 1), _HIDDEN)
        self.matrix(f"{blk}attn_k", kv_heads * dim, _HIDDEN)
        self.matrix(f"{blk}attn_v", kv_heads * dim, _HIDDEN)
        self.matrix(f"{blk}attn_output", _HIDDEN, heads * dim)
        self.norms(blk, dim, "attn_q_norm", "attn_k_norm")

    def heads(self, heads: int, kv_heads: int, dim: int, rotated: int) -> None:
        """Add the settings of attention."""
        writer = self.writer
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(dim)
        writer.add_value_length(dim)
        writer.add_rope_dimension_count(rotated)


def write_mixture(path: Path, kind: Kind) -> None:
    """Qwen3's mixture, 337M parameters, 77M of which a token uses."""
    file = _File(path, "qwen3moe", kind)
    experts, chosen, inner, heads, kv_heads, dim = 32, 4, 384, 16, 4, 64
    file.heads(heads, kv_heads, dim, dim)
    file.writer.add_feed_forward_length(inner * chosen)
    file.writer.add_expert_count(experts)
    file.writer.add_expert_used_count(chosen)
    file.writer.add_expert_feed_forward_length(inner)
    random = np.random.default_rng(1)
    for layer in range(_LAYERS):
        blk = f"blk.{layer}."
        file.attention(blk, heads, kv_heads, dim, gated=False)
        file.floats(f"{blk}ffn_gate_inp.weight", random.normal(size=(experts, _HIDDEN)))
        file.gated(blk, inner, _HIDDEN, experts=experts)
        file.norms(blk, _HIDDEN, "attn_norm", "ffn_norm")
    file.close()


def write_hybrid(path: Path, kind: Kind) -> None:
    """Qwen3.5's delta nets, three of them to one attention; 186M parameters."""
    file = _File(path, "qwen35", kind)
    heads, kv_heads, dim, inner = 8, 2, 256, 3584
    key_heads, value_heads, size, kernel = 16, 16, 128, 4
    file.heads(heads, kv_heads, dim, dim // 4)
    writer = file.writer
    writer.add_feed_forward_length(inner)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(value_heads * size)
    writer.add_ssm_state_size(size)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_group_count(key_heads)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    random = np.random.default_rng(1)
    channels = (2 * key_heads + value_heads) * size
    for layer in range(_LAYERS):
        blk = f"blk.{layer}."
        if layer % 4 == 3:
            file.attention(blk, heads, kv_heads, dim, gated=True)
        else:
            file.matrix(f"{blk}attn_qkv", channels, _HIDDEN)
            file.matrix(f"{blk}attn_gate", value_heads * size, _HIDDEN)
            file.matrix(f"{blk}ssm_out", _HIDDEN, value_heads * size)
            file.floats(f"{blk}ssm_conv1d.weight", random.normal(size=(channels, kernel)))
            file.floats(f"{blk}ssm_dt.bias", np.zeros(value_heads))
            file.floats(f"{blk}ssm_a", -np.ones(value_heads))
            file.floats(f"{blk}ssm_norm.weight", np.ones(size))
            for name in ("ssm_beta", "ssm_alpha"):
                gates = 0.01 * random.normal(size=(value_heads, _HIDDEN))
                file.floats(f"{blk}{name}.weight", gates)
        file.gated(blk, inner, _HIDDEN)
        file.norms(blk, _HIDDEN, "attn_norm", "post_attention_norm")
    file.close()


Write = Callable[..., None]
FILES: dict[str, Write] = {"mixture": write_mixture, "hybrid": write_hybrid}
