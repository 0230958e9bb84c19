"""Mistral (arXiv:2310.06825), Mixtral (arXiv:2401.04088) and Ministral."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    alike,
    attention,
    by_type,
    decoder,
    mlp,
    rms,
    softmax_mixture,
    windows,
)
from quire.models.moe import SoftmaxRouter
from quire.models.names import Names
from quire.models.settings import FULL, SLIDING, Settings

_UNUSED = ("vision_tower.", "multi_modal_projector.", "vision_encoder.", "patch_merger.")


def mistral(s: Settings) -> LanguageModel:
    windowed = replace(attention(s, qkv_bias=False, out_bias=False), window=s.window(4096))
    return decoder(s, alike(s, windowed, mlp(s, bias=False)))


def mixtral(s: Settings) -> LanguageModel:
    s = s.filled(num_experts_per_tok=2)
    router = SoftmaxRouter(s.integer("num_experts_per_tok"), normalise=True)
    usual = attention(s, window=s.window(), rope=s.rope(theta=1e6))
    layers = alike(
        s, usual, softmax_mixture(s, width=s.integer("intermediate_size"), router=router)
    )
    parts = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return decoder(s, layers, Names(renamed=parts), norm=rms(s, 1e-5))


def ministral(s: Settings) -> LanguageModel:
    usual = attention(s, qkv_bias=False, out_bias=False)
    kind = FULL if s.window(4096) is None else SLIDING
    types = s.layer_types([kind] * s.integer("num_hidden_layers"))
    return decoder(s, by_type(types, windows(s, usual, 4096), mlp(s, bias=False)))


def mistral3(s: Settings) -> LanguageModel:
    """The text of Mistral Small 3.1 and 3.2; its vision encoder is left out."""
    text = s.within("text_config")
    text.only("model_type", "mistral")
    text = text.changed(tie_word_embeddings=s.flag("tie_word_embeddings", default=False))
    windowed = replace(attention(text, qkv_bias=False, out_bias=False), window=text.window(4096))
    return decoder(text, alike(text, windowed, mlp(text, bias=False)), Names(unused=_UNUSED))


FAMILIES = (
    Family("mistral", "Mistral, Mistral Nemo, Mistral Small 2 and 3", mistral),
    Family("mixtral", "Mixtral", mixtral),
    Family("ministral", "Ministral", ministral),
    Family("mistral3", "Mistral Small 3.1 and 3.2, text", mistral3),
)
