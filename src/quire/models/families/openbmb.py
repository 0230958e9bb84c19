"""MiniCPM 1 and 2 (arXiv:2404.06395), and 3."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import Family, attention, decoder, mlp, uniform_layers
from quire.models.families.deepseek import latent_attention
from quire.models.settings import Settings
from quire.models.weights.names import Names


def minicpm(s: Settings) -> LanguageModel:
    """Build MiniCPM: Llama with multipliers that transfer learning rates across sizes."""
    s.only("num_experts", 0)
    depth = s.number("scale_depth", default=1.0)
    return decoder(
        s,
        uniform_layers(s, attention(s), mlp(s)),
        tied=True,
        embedding_multiplier=s.number("scale_emb", default=1.0),
        residual_multiplier=depth / s.integer("num_hidden_layers") ** 0.5,
        head_multiplier=s.number("dim_model_base", default=1.0) / s.integer("hidden_size"),
    )


def minicpm3(s: Settings) -> LanguageModel:
    """Build MiniCPM 3: the same multipliers with latent attention."""
    heads, size = s.integer("num_attention_heads"), s.integer("hidden_size")
    count = s.integer("num_hidden_layers")
    s = s.filled(
        kv_lora_rank=256,
        q_lora_rank=None if s.null("q_lora_rank") else 768,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=size // heads,
        rms_norm_eps=1e-5,
        rope_interleave=False,
    )
    kind = latent_attention(s)
    depth = s.number("scale_depth", default=count**0.5 if s.null("scale_depth") else 1.4)
    base = s.number("dim_model_base", default=size if s.null("dim_model_base") else 256)
    return decoder(
        s,
        uniform_layers(s, kind, mlp(s)),
        Names(prepare=kind.absorbed),
        tied=True,
        embedding_multiplier=s.number("scale_emb", default=12.0),
        residual_multiplier=depth / count**0.5,
        head_multiplier=base / size,
    )


FAMILIES = (
    Family("minicpm", "MiniCPM 1 and 2", minicpm),
    Family("minicpm3", "MiniCPM 3", minicpm3),
)
