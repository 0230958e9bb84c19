"""Whisper (arXiv:2212.04356): a decoder that attends to sound of 30 seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.media import CrossMedia, PlacedMedia
from quire.models.audio.whisper import AudioTower, WhisperAudio, WhisperSoundEncoder
from quire.models.base import LanguageModel, MediaEncoder
from quire.models.decoder import DecoderModel
from quire.models.description import Description, Layer, Norm
from quire.models.families.common import Family, activation
from quire.models.layers.attention import Attention
from quire.models.layers.cross_attention import CrossAttention
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights

_ENCODER, _DECODER = "model.encoder.", "model.decoder."
_HERE = "audio_tower."
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_FIRST = {
    "self_attn_layer_norm": "input_layernorm",
    "self_attn": "self_attn",
}
_SECOND = {
    "encoder_attn_layer_norm": "input_layernorm",
    "encoder_attn": "cross_attn",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
"""Modules of a published layer, which are two here: one sees the text, one the sound."""


def whisper(s: Settings) -> LanguageModel:
    s = s.changed(hidden_act=s.word("activation_function", default="gelu"))
    hidden, heads = s.integer("d_model"), s.integer("decoder_attention_heads")
    if hidden % heads:
        raise ModelError(f"{s.file}: d_model = {hidden} is no multiple of {heads} heads")
    act, head_dim = activation(s), hidden // heads
    norm = Norm(1e-5, centred=True, bias=True)
    seen = Attention(
        heads, heads, head_dim, scale=head_dim**-0.5, rope=None, qkv_bias=True, out_bias=True
    )
    heard = CrossAttention(heads, heads, head_dim, norm=None, bias=True)
    fed = MLP(s.integer("decoder_ffn_dim"), act, gated=False, bias=True)
    layers = (Layer((seen,), feed_forward=None), Layer((heard,), fed)) * s.integer("decoder_layers")
    scaled = s.flag("scale_embedding", default=False)
    decoder = Description(
        vocab_size=s.integer("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        norm=norm,
        embedding_multiplier=hidden**0.5 if scaled else 1.0,
        tied_head=True,
        positions=context(s),
    )
    encoder = WhisperAudio(
        bins=s.integer("num_mel_bins", default=80),
        rows=s.integer("max_source_positions", default=1500),
        depth=s.integer("encoder_layers"),
        hidden_size=hidden,
        heads=s.integer("encoder_attention_heads"),
        width=s.integer("encoder_ffn_dim"),
        activation=act,
    )
    s.refuse_unasked()
    return WhisperModel(decoder, encoder)


def context(s: Settings) -> int:
    """Return how many tokens prompt and answer may have together."""
    return s.integer("max_target_positions", default=448)


class WhisperModel(DecoderModel):
    """A decoder with cross-attention: each row attends to its sequence's encoded audio."""

    def __init__(self, description: Description, kind: WhisperAudio) -> None:
        super().__init__(description, Names())
        self.audio_tower = AudioTower(kind)

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        return {"audio": WhisperSoundEncoder(self.audio_tower)}

    def cross_media(self, media: Sequence[PlacedMedia]) -> tuple[CrossMedia, ...]:
        rows = self.audio_tower.kind.rows
        ends = [each.start for each in media[1:]] + [None] * bool(media)
        return tuple(
            CrossMedia(each.start, end, (each.item,), visible=((each.start, rows),))
            for each, end in zip(media, ends, strict=True)
        )

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text: Weights = {}
        heard: Weights = {}
        for name, array in weights.items():
            if name.startswith((_ENCODER, _HERE)):
                heard[_HERE + name.removeprefix(_ENCODER).removeprefix(_HERE)] = array
            else:
                text[_own_name(name)] = array
        for name in (f"{_HERE}conv1.weight", f"{_HERE}conv2.weight"):
            if name in heard and heard[name].shape[-1] == 3:
                heard[name] = heard[name].swapaxes(1, 2)  # published with channels before time
        ready = super().sanitize(text) | heard
        return ready | _zero_biases(ready)


def _own_name(name: str) -> str:
    """Return the name here of a decoder's tensor."""
    if name.startswith("proj_out."):
        return name.replace("proj_out.", "lm_head.")
    inner = name.removeprefix(_DECODER)
    found = _LAYER.fullmatch(inner)
    if found is None:
        return name if inner == name else "model." + inner.replace("layer_norm.", "norm.")
    number, rest = int(found[1]), found[2].replace("out_proj.", "o_proj.")
    module, _, kind = rest.partition(".")
    if module in _FIRST:
        return f"model.layers.{2 * number}.{_FIRST[module]}.{kind}"
    return f"model.layers.{2 * number + 1}.{_SECOND.get(module, module)}.{kind}"


def _zero_biases(weights: Weights) -> Weights:
    """Return zeros for the biases of keys, which published attention has not."""
    found: Weights = {}
    for name, array in weights.items():
        if name.endswith("attn.q_proj.bias"):
            bias = name.replace("q_proj", "k_proj")
            if bias not in weights:
                found[bias] = mx.zeros_like(array)
    return found


FAMILIES = (Family("whisper", "Whisper", whisper, context=context),)
