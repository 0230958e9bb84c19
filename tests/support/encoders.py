"""Small encoders of text: configurations, tokenizers, and what sentence-transformers writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from tests.support.family_shapes import FULL, SLIDING

WORDS = ("a", "an", "the", "cat", "dog", "sleeps", "runs", "sky", "is", "blue", "who", "where")
ASKED = ("query", "document")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY = 200

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 0,
}
_SCORES = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_BERT = {**_SIZES, "model_type": "bert", "num_hidden_layers": 3, "max_position_embeddings": 96}
_ROBERTA = _BERT | {"max_position_embeddings": 98, "type_vocab_size": 1, "pad_token_id": 1}
_MODERN = {
    **_SIZES,
    "model_type": "modernbert",
    "num_hidden_layers": 5,
    "max_position_embeddings": 256,
    "local_attention": 16,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_GEMMA = {
    **_SIZES,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 17,
    "use_bidirectional_attention": True,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "bos_token_id": 2,
    "eos_token_id": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "bert-rerank": _BERT | _SCORES,
    "camembert": _ROBERTA | {"model_type": "camembert"},
    "roberta": _ROBERTA | {"model_type": "roberta"},
    "xlm-roberta": _ROBERTA | {"model_type": "xlm-roberta"},
    "xlm-roberta-rerank": _ROBERTA | {"model_type": "xlm-roberta"} | _SCORES,
    "modernbert": _MODERN,
    "modernbert-biases": _MODERN
    | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 30},
    "modernbert-rerank": _MODERN | _SCORES,
    "modernbert-rerank-mean": _MODERN
    | _SCORES
    | {"classifier_pooling": "mean", "classifier_bias": True},
    "gemma3_text-bidirectional": _GEMMA,
}
ENCODERS = {each["model_type"] for each in CONFIGS.values()} - {"gemma3_text"}
"""Model types that generate nothing."""


def write_tokenizer(folder: Path, *, typed: bool = False) -> None:
    """Write a tokenizer of words that joins texts as BERT does.

    Args:
        typed: whether transformers gets the kinds of tokens.
    """
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS, *ASKED])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.save(str(folder / "tokenizer.json"))
    names = ("pad_token", "unk_token", "cls_token", "sep_token")
    named = dict(zip(names, SPECIAL, strict=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 96,
        "model_input_names": ["input_ids", "attention_mask", *["token_type_ids"] * typed],
        **named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_modules(
    folder: Path,
    pooling: str = "mean",
    dense: Sequence[str] = (),
    *,
    normalized: bool = True,
    max_tokens: int = 64,
) -> None:
    """Write the stages of sentence-transformers.

    Args:
        dense: folders of linear layers, which are written elsewhere.
    """
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *((each, "Dense") for each in dense)]
    if normalized:
        kinds.append((f"{len(kinds)}_Normalize", "Normalize"))
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds)
    ]
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": 64,
            f"pooling_mode_{pooling}_token" + "s" * (pooling in ("mean", "max")): True,
        },
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query ", "document": "document "},
            "default_prompt_name": None,
        },
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
