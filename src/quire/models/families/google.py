"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786).

Gemma 4 is in `gemma4`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.models.base import LanguageModel
from quire.models.description import Layer, Mixer, Norm, NormPlacement
from quire.models.families.common import (
    Family,
    activation,
    attention,
    by_type,
    decoder,
    full_every,
    mlp,
    rms,
    uniform_layers,
    windows,
)
from quire.models.families.gemma3n import Gemma3n
from quire.models.families.gemma4 import Gemma4
from quire.models.families.gemma4_unified import Gemma4Unified
from quire.models.families.vision import tiled_vision_model, vision_transformer, without_vision
from quire.models.layers.attention import Attention, QKNorm
from quire.models.layers.feed_forward import MLP
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.vision.projectors import PoolingProjector
from quire.models.weights.names import Names

_NAMES = Names(less_one=("norm.weight",))


def gemma(s: Settings) -> LanguageModel:
    s.only("use_bidirectional_attention", False)
    s.only("hidden_act", "gelu", "gelu_pytorch_tanh")
    # Early configurations say "gelu" but mean its approximation.
    s = s.changed(hidden_act="gelu_pytorch_tanh")
    return _decoder(s, uniform_layers(s, attention(s), mlp(s, bias=False)))


def gemma2(s: Settings) -> LanguageModel:
    return _gemma2(s, _NAMES, placement=NormPlacement.SANDWICH)


def vaultgemma(s: Settings) -> LanguageModel:
    """Build VaultGemma (arXiv:2510.15001): Gemma 2 with norms only before blocks."""
    names = replace(_NAMES, renamed={"pre_feedforward_layernorm": "post_attention_layernorm"})
    return _gemma2(s, names, placement=NormPlacement.PRE)


def _gemma2(s: Settings, names: Names, *, placement: NormPlacement) -> LanguageModel:
    s.only("use_bidirectional_attention", False)
    usual = attention(s, scale=_scale(s), softcap=_softcap(s, "attn_logit_softcapping", 50.0))
    types = s.layer_types(full_every(s, 2))
    layers = by_type(types, windows(s, usual, 4096), _block(s))
    cap = _softcap(s, "final_logit_softcapping", 30.0)
    return _decoder(s, layers, names, placement=placement, logit_softcap=cap)


def gemma3(s: Settings) -> LanguageModel:
    """Build Gemma 3. Rows of a picture see each other, in full layers too."""
    # Text-only conversions have a `vision_config` without sizes.
    sees = s.has("vision_config") and s.within("vision_config").has("hidden_size")
    text = gemma3_text(s.within("text_config"), bidirectional_media=sees)
    if not sees:
        return without_vision(text)
    kind = vision_transformer(s.within("vision_config"), (-1,), last_norm=True)
    side = max(1, math.isqrt(s.integer("mm_tokens_per_image", default=256)))
    return tiled_vision_model(text, kind, PoolingProjector(kind.side // side, Norm(kind.norm.eps)))


def gemma3_text(s: Settings, *, bidirectional_media: bool = False) -> LanguageModel:
    # Configurations of the multimodal models omit transformers' defaults.
    s = s.filled(
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        tie_word_embeddings=True,
    )
    caps = [_softcap(s, f"{which}_logit_softcapping", default=None) for which in ("attn", "final")]
    usual = attention(
        s,
        scale=_scale(s),
        qk_norm=QKNorm(rms(s)),
        rope=None,
        softcap=caps[0],
        bidirectional_media=bidirectional_media,
        bidirectional=s.flag("use_bidirectional_attention", default=False),
    )
    if usual.bidirectional:
        s.only("attn_logit_softcapping", None)
    types = s.layer_types(full_every(s, s.integer("sliding_window_pattern", default=6)))
    layers = by_type(types, _mixers(s, usual), _block(s))
    return _decoder(s, layers, placement=NormPlacement.SANDWICH, logit_softcap=caps[1])


def _decoder(
    s: Settings, layers: tuple[Layer, ...], names: Names = _NAMES, **changes: Any
) -> LanguageModel:
    root = s.integer("hidden_size") ** 0.5
    return decoder(s, layers, names, tied=True, embedding_multiplier=root, **changes)


def _block(s: Settings) -> MLP:
    return mlp(s, activation=activation(s, "gelu_pytorch_tanh"), bias=False)


def _scale(s: Settings) -> float:
    return float(s.integer("query_pre_attn_scalar", default=256) ** -0.5)


def _softcap(s: Settings, name: str, default: float | None) -> float | None:
    if name not in s.values:
        return default
    return s.number(name) if s.has(name) else None


def _mixers(s: Settings, usual: Attention) -> dict[str, Mixer]:
    """Return attention by layer type. Full layers rotate more slowly; only they are extended.

    A window of EmbeddingGemma is divided among both sides of a query.
    """
    window = s.window(4096)
    if usual.bidirectional and window is not None:
        window //= 2
    full, sliding = s.rope_by_type(1e6, s.number("rope_local_base_freq", default=1e4))
    return {
        FULL: replace(usual, rope=full),
        SLIDING: replace(usual, rope=sliding, window=window),
    }


def _unified(s: Settings) -> LanguageModel:
    return Gemma4Unified.from_config(s.values)


FAMILIES = (
    Family("gemma", "Gemma", gemma),
    Family("gemma2", "Gemma 2", gemma2),
    Family("gemma3", "Gemma 3, text and images", gemma3),
    Family("gemma3_text", "Gemma 3, text; EmbeddingGemma", gemma3_text),
    Family("gemma3n", "Gemma 3n, text, images, sound", lambda s: Gemma3n.from_config(s.values)),
    Family("gemma3n_text", "Gemma 3n, text", lambda s: Gemma3n.from_config(s.values)),
    Family("gemma4", "Gemma 4, text, images, video, sound", lambda s: Gemma4.from_config(s.values)),
    Family("gemma4_text", "Gemma 4, text", lambda s: Gemma4.from_config(s.values)),
    Family("gemma4_unified", "Gemma 4 12B, text, images, video, sound", _unified),
    Family("gemma4_unified_text", "Gemma 4 12B, text", _unified),
    Family("vaultgemma", "VaultGemma", vaultgemma),
)
