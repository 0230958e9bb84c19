"""StarCoder 2 (arXiv:2402.19173)."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import Family, activation, attention, decoder, uniform_layers
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.weights.names import Names


def starcoder2(s: Settings) -> LanguageModel:
    bias = s.flag("use_bias", default=True)
    usual = attention(s, qkv_bias=bias, out_bias=bias, window=s.window())
    name = activation(s, "gelu_pytorch_tanh")
    block = MLP(s.integer("intermediate_size"), name, gated=False, bias=bias)
    norm = Norm(s.number("norm_epsilon", default=1e-5, minimum=0.0), centred=True, bias=True)
    parts = {"c_fc": "up_proj", "c_proj": "down_proj"}
    return decoder(s, uniform_layers(s, usual, block), Names(renamed=parts), norm=norm, tied=True)


FAMILIES = (Family("starcoder2", "StarCoder 2", starcoder2),)
