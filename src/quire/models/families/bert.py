"""BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692), XLM-RoBERTa (arXiv:1911.02116), and
ModernBERT (arXiv:2412.13663).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from quire.models.base import LanguageModel
from quire.models.description import Description, Layer, Norm, NormPlacement
from quire.models.families.common import Family, activation
from quire.models.layers.attention import Attention
from quire.models.layers.feed_forward import MLP
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.text_encoder import ClassificationHead, TextEncoder, TextEncoderDescription
from quire.models.weights.names import Names, Weights, translate

_BERT_NAMES = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_types",
    "embeddings.LayerNorm": "embed_norm",
    "encoder.layer": "layers",
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "input_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_attention_layernorm",
    "gamma": "weight",
    "beta": "bias",
}
_MODERN_NAMES = {
    "embeddings.tok_embeddings": "embed_tokens",
    "embeddings.norm": "embed_norm",
    "attn.Wqkv": "self_attn.Wqkv",
    "attn.Wo": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "mlp.Wo": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
    "final_norm": "norm",
}
_UNUSED = ("embeddings.position_ids", "pooler.", "cls.", "lm_head.", "decoder.", "qa_outputs.")
"""Prefixes of tensors that neither embeddings nor scores need."""


def bert(s: Settings) -> LanguageModel:
    return _bert(s, offset=0, head={"pooler.dense": "classifier.dense", "classifier": _OUT})


def roberta(s: Settings) -> LanguageModel:
    """Build RoBERTa, whose table of positions begins behind that of the padding token."""
    return _bert(s, offset=_offset(s), head={})


_OUT = "classifier.out_proj"


def _offset(s: Settings) -> int:
    return s.integer("pad_token_id", default=1, minimum=0) + 1


def _bert(s: Settings, offset: int, head: Mapping[str, str]) -> LanguageModel:
    s = s.filled(
        max_position_embeddings=512, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12
    )
    s.only("position_embedding_type", "absolute")
    s.only("is_decoder", False)
    s.only("add_cross_attention", False)
    hidden, heads = s.integer("hidden_size"), s.integer("num_attention_heads")
    attention = _attention(hidden // heads, heads, bias=True)
    fed = MLP(s.integer("intermediate_size"), activation(s), gated=False, bias=True)
    body = Description(
        vocab_size=s.integer("vocab_size"),
        hidden_size=hidden,
        layers=(Layer((attention,), fed),) * s.integer("num_hidden_layers"),
        norm=Norm(s.number("layer_norm_eps", minimum=0.0), centred=True, bias=True),
        placement=NormPlacement.ADDED,
        positions=s.integer("max_position_embeddings") - offset,
    )
    labels = _labels(s)
    classifies = None if not labels else ClassificationHead(labels, "tanh")
    s.refuse_unasked()
    names = _names(_BERT_NAMES, head if labels else {}, reads_head=bool(labels))
    described = TextEncoderDescription(
        body, token_types=s.integer("type_vocab_size"), final_norm=False, head=classifies
    )
    return TextEncoder(described, _named(names, offset))


def modernbert(s: Settings) -> LanguageModel:
    """Build ModernBERT. Its first layer has no norm before attention: the embeddings have one."""
    s = s.filled(max_position_embeddings=8192, norm_eps=1e-5)
    hidden, heads = s.integer("hidden_size"), s.integer("num_attention_heads")
    width = s.integer("intermediate_size")
    bias = s.flag("attention_bias", default=False)
    full, sliding = s.rope_by_type(
        s.number("global_rope_theta", default=160_000.0),
        s.number("local_rope_theta", default=10_000.0),
    )
    usual = _attention(hidden // heads, heads, bias=bias)
    reach = s.integer("local_attention", default=128) // 2
    mixers = {
        FULL: replace(usual, rope=full),
        SLIDING: replace(usual, rope=sliding, window=reach),
    }
    act = s.word("hidden_activation", default="gelu")
    fed = MLP(width, activation(s, act), bias=s.flag("mlp_bias", default=False))
    every = s.integer("global_attn_every_n_layers", default=3)
    count = s.integer("num_hidden_layers")
    types = s.layer_types([SLIDING if number % every else FULL for number in range(count)])
    first, *others = (Layer((mixers[kind],), fed) for kind in types)
    body = Description(
        vocab_size=s.integer("vocab_size"),
        hidden_size=hidden,
        layers=(replace(first, placement=NormPlacement.SECOND), *others),
        norm=Norm(
            s.number("norm_eps", minimum=0.0), centred=True, bias=s.flag("norm_bias", default=False)
        ),
    )
    labels = _labels(s)
    classifies = _modern_head(s, labels) if labels else None
    s.refuse_unasked()
    head = {"head.dense": "classifier.dense", "head.norm": "classifier.norm", "classifier": _OUT}
    names = replace(
        _names(_MODERN_NAMES, head if labels else {}, reads_head=bool(labels)),
        fused={
            "Wqkv": (("q_proj", hidden), ("k_proj", hidden), ("v_proj", hidden)),
            "Wi": (("gate_proj", width), ("up_proj", width)),
        },
    )
    described = TextEncoderDescription(body, token_types=0, final_norm=True, head=classifies)
    return TextEncoder(described, _named(names))


def _modern_head(s: Settings, labels: int) -> ClassificationHead:
    s.only("classifier_pooling", "cls", "mean")
    pooling: Literal["cls", "mean"] = (
        "mean" if s.word("classifier_pooling", default="cls") == "mean" else "cls"
    )
    return ClassificationHead(
        labels,
        activation(s.changed(hidden_act=s.word("classifier_activation", default="gelu"))),
        bias=s.flag("classifier_bias", default=False),
        normed=True,
        pooling=pooling,
    )


def _attention(head_dim: int, heads: int, *, bias: bool) -> Attention:
    return Attention(
        heads,
        heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
        bidirectional=True,
    )


def _labels(s: Settings) -> int:
    """Return the number of labels of the checkpoint's classification head; 0 without one."""
    if not any(each.endswith("ForSequenceClassification") for each in s.names("architectures")):
        return 0
    named = s.nested("id2label", needed=False).values
    return s.integer("num_labels", default=len(named) or 2)


def _names(body: Mapping[str, str], head: Mapping[str, str], *, reads_head: bool) -> Names:
    read = tuple(head) if reads_head else ()
    unused = tuple(each for each in _UNUSED if not any(name.startswith(each) for name in read))
    if not reads_head:
        unused += ("classifier.", "head.")
    return Names(renamed={**body, **head}, unused=unused)


def _named(names: Names, offset: int = 0) -> Callable[[Weights], Weights]:
    """Return a function that translates a checkpoint's tensors.

    Args:
        offset: rows at the beginning of the table of positions that no token has.
    """

    def named(weights: Weights) -> Weights:
        bare = {
            name.removeprefix("bert.").removeprefix("roberta."): array
            for name, array in weights.items()
        }
        ready: Weights = {}
        for name, array in translate(bare, names).items():
            own = "classifier." + name.removeprefix("model.classifier.")
            place = own if name.startswith("model.classifier.") else name
            ready[place] = array[offset:] if ".embed_positions." in place else array
        return ready

    return named


def _behind_padding(s: Settings) -> int:
    return s.integer("max_position_embeddings", default=512) - _offset(s)


FAMILIES = (
    Family("bert", "BERT, also BGE, E5, MiniLM", bert),
    Family("camembert", "CamemBERT", roberta, context=_behind_padding),
    Family("modernbert", "ModernBERT, also GTE", modernbert),
    Family("roberta", "RoBERTa", roberta, context=_behind_padding),
    Family("xlm-roberta", "XLM-RoBERTa, also BGE-M3", roberta, context=_behind_padding),
)
