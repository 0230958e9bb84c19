"""The tokenizer in a GGUF file, as the files that Hugging Face publishes.

`tokenizer.ggml.model` names its kind: `gpt2` is BPE over bytes with merges, `llama` SentencePiece's
BPE with scores (arXiv:1808.06226), whose merges follow from the scores, `t5` its unigrams
(arXiv:1804.10959), which take the most likely of all ways to cut a text.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from typing import Any

from quire.core.errors import ModelError
from quire.models.gguf.file import GGUF
from quire.models.gguf.metadata import OF_TOKENIZER, WHOLE, WORD, check
from quire.models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

log = logging.getLogger("quire.models")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "[e~[",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
    }
)
"""Tokens that end an answer though no key of the file says so; llama.cpp's list."""
_GEMMA4_MARKS = frozenset(
    {
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    }
)
"""Special tokens that the converter marks as others, so that llama.cpp shows them."""

Json = dict[str, Any]


def tokenizer_files(gguf: GGUF) -> dict[str, Json]:
    """`tokenizer.json` and `tokenizer_config.json`.

    Raises:
        ModelError: there is no tokenizer in the file, or one of an unknown kind.
    """
    kind = _key(gguf, "model")
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ModelError(
            f"{gguf.files[0]}: tokenizer.ggml.model = {kind!r} is not supported (known: {known})"
        )
    tokens = _tokens(gguf)
    parts = _KINDS[kind](gguf, tokens)
    whole: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(gguf, tokens),
        "post_processor": _ends(gguf, tokens),
    }
    named = {name: _text_of(gguf, tokens, key) for name, key in _IDS.items()}
    config: Json = {name: text for name, text in named.items() if text is not None}
    if templates := _templates(gguf):
        config["chat_template"] = templates
    return {"tokenizer.json": whole | parts, "tokenizer_config.json": config}


def end_ids(gguf: GGUF) -> list[int]:
    """The ids of all tokens that end an answer."""
    ids = {_key(gguf, name) for name in _ENDS} - {None}
    tokens = _tokens(gguf)
    controls = {
        text: id for id, (text, kind) in enumerate(_kinds(gguf, tokens)) if kind == _CONTROL
    }
    ends = _END_TEXTS
    if "<|return|>" in controls and "<|call|>" in controls:
        ends -= {"<|end|>"}  # gpt-oss: the end of a message, not of an answer
    return sorted(ids | {id for text, id in controls.items() if text in ends})


def _key(gguf: GGUF, name: str, default: Any = None) -> Any:
    """Raises: ModelError: the value is of another type than it has to be."""
    key = f"tokenizer.ggml.{name}"
    if key not in gguf.metadata:
        return default
    check(gguf.files[0], key, gguf.metadata[key], OF_TOKENIZER.get(name, WHOLE))
    return gguf.metadata[key]


def _kinds(gguf: GGUF, tokens: list[str]) -> list[tuple[str, int]]:
    return list(zip(tokens, _key(gguf, "token_type") or [_NORMAL] * len(tokens), strict=True))


def _tokens(gguf: GGUF) -> list[str]:
    """Texts by id.

    Raises:
        ModelError: there are none, or lists of different lengths.
    """
    tokens = _key(gguf, "tokens")
    if not tokens:
        raise ModelError(f"{gguf.files[0]}: no 'tokenizer.ggml.tokens' in the metadata")
    for name in ("token_type", "scores"):
        listed = _key(gguf, name)
        if listed is not None and len(listed) != len(tokens):
            raise ModelError(
                f"{gguf.files[0]}: tokenizer.ggml.{name} has {len(listed)} entries for "
                f"{len(tokens)} tokens"
            )
    return list(tokens)


def _added(gguf: GGUF, tokens: list[str]) -> list[Json]:
    """The tokens that are matched whole, special or not."""
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    kinds = _key(gguf, "token_type") or []
    # Phi-3's tokens swallow the space behind them, but for those that every Llama has.
    swallow = gguf.architecture == "phi3" and _key(gguf, "model") == "llama"
    marks = _GEMMA4_MARKS if _key(gguf, "model") == "gemma4" else frozenset()
    return [
        {
            "id": id,
            "content": tokens[id],
            "special": kind != _USER_DEFINED or tokens[id] in marks,
            "rstrip": swallow and tokens[id] not in ("<unk>", "<s>", "<|endoftext|>"),
            **flags,
        }
        for id, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _text_of(gguf: GGUF, tokens: list[str], key: str) -> str | None:
    id = _key(gguf, key)
    return tokens[id] if isinstance(id, int) and 0 <= id < len(tokens) else None


def _ends(gguf: GGUF, tokens: list[str]) -> Json | None:
    """What is added to a text's beginning and end."""
    kind = _key(gguf, "model")
    begins = _pre(gguf).begins if kind == "gpt2" else kind != "t5"
    added = {
        "bos_token_id": bool(_key(gguf, "add_bos_token", begins)),
        "eos_token_id": bool(_key(gguf, "add_eos_token", kind == "t5")),
    }
    used = {key: _text_of(gguf, tokens, key) for key, wanted in added.items() if wanted}
    texts = {key: text for key, text in used.items() if text is not None}
    if not texts:
        return None

    def piece(key: str, sequence: int) -> list[Json]:
        return [{"SpecialToken": {"id": texts[key], "type_id": sequence}}] if key in texts else []

    def around(name: str, sequence: int) -> list[Json]:
        body = {"Sequence": {"id": name, "type_id": sequence}}
        return [*piece("bos_token_id", sequence), body, *piece("eos_token_id", sequence)]

    special = {
        text: {"id": text, "ids": [_key(gguf, key)], "tokens": [text]}
        for key, text in texts.items()
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": special,
    }


def _templates(gguf: GGUF) -> str | list[Json] | None:
    """The chat template, or all of them by name."""
    prefix = "tokenizer.chat_template"
    for key, value in gguf.metadata.items():
        if key == prefix or key.startswith(f"{prefix}."):
            check(gguf.files[0], key, value, WORD)
    whole = gguf.metadata.get(prefix)
    named = {
        key.removeprefix(f"{prefix}."): text
        for key, text in gguf.metadata.items()
        if key.startswith(f"{prefix}.")
    }
    if not named:
        return whole
    if whole is not None:
        named["default"] = whole
    return [{"name": name, "template": text} for name, text in named.items()]


def _pre(gguf: GGUF) -> PreTokenizer:
    name = _key(gguf, "pre", "default")
    known = PRE_TOKENIZERS.get(name)
    if known is None:
        names = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"{gguf.files[0]}: tokenizer.ggml.pre = {name!r} is not supported (known: {names})"
        )
    return known


_BPE: Json = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _byte_level(gguf: GGUF, tokens: list[str]) -> Json:
    pre = _pre(gguf)
    if "tokenizer.ggml.pre" not in gguf.metadata:
        log.warning(
            "%s: no tokenizer.ggml.pre: texts may be cut otherwise than in training", gguf.files[0]
        )
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.components()},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": _BPE
        | {
            "ignore_merges": pre.whole,
            "vocab": {text: id for id, text in enumerate(tokens)},
            "merges": _pairs(gguf),
        },
    }


def _pairs(gguf: GGUF) -> list[list[str]]:
    """Two texts a merge; a space stands between them, and may begin the first."""
    pairs = []
    for index, merge in enumerate(_need(gguf, "merges")):
        at = merge.find(" ", 1)
        if at < 0:
            raise ModelError(
                f"{gguf.files[0]}: tokenizer.ggml.merges[{index}] = {merge!r} is not two texts"
            )
        pairs.append([merge[:at], merge[at + 1 :]])
    return pairs


def _need(gguf: GGUF, name: str) -> list[Any]:
    value = _key(gguf, name)
    if value is None:
        raise ModelError(f"{gguf.files[0]}: no 'tokenizer.ggml.{name}' in the metadata")
    listed: list[Any] = value
    return listed


def _scored(gguf: GGUF, tokens: list[str]) -> Json:
    vocab = {text: id for id, text in enumerate(tokens)}
    prefix = bool(_key(gguf, "add_space_prefix", True))
    return _over_text(gguf, tokens, _merges(vocab, _need(gguf, "scores")), prefix)


def _gemma4(gguf: GGUF, tokens: list[str]) -> Json:
    return _over_text(gguf, tokens, _pairs(gguf), False)


def _over_text(gguf: GGUF, tokens: list[str], merges: list[list[str]], prefix: bool) -> Json:
    """BPE over characters, and bytes where they are not in the vocabulary.

    Args:
        prefix: a space is put before each text.
    """
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    vocab = {text: id for id, text in enumerate(tokens)}
    unknown = _key(gguf, "unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ModelError(
            f"{gguf.files[0]}: tokenizer.ggml.unknown_token_id = {unknown} is none of "
            f"{len(tokens)} tokens"
        )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": _text_decoder(prefix),
        "model": _BPE
        | {
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _text_decoder(prefix: bool) -> Json:
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": back}


def _unigrams(gguf: GGUF, tokens: list[str]) -> Json:
    """Likelihoods of tokens. Bytes stand for characters that no token has, where there are any."""
    normalizers: list[Json] = []
    if charsmap := _key(gguf, "precompiled_charsmap"):
        coded = base64.b64encode(bytes(each & 255 for each in charsmap)).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": coded})
    if _key(gguf, "remove_extra_whitespaces", True):
        runs = {"Regex": " {2,}"}
        normalizers += [
            {"type": "Strip", "strip_left": False, "strip_right": True},
            {"type": "Replace", "pattern": runs, "content": _SPACE},
        ]
    prefix = bool(_key(gguf, "add_space_prefix", True))
    scheme = "always" if prefix else "never"
    scores = _need(gguf, "scores")
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": scheme,
            "split": True,
        },
        "decoder": _text_decoder(prefix),
        "model": {
            "type": "Unigram",
            "unk_id": _key(gguf, "unknown_token_id", 2),
            "vocab": [list(pair) for pair in zip(tokens, scores, strict=True)],
            "byte_fallback": any(kind == _BYTE for _, kind in _kinds(gguf, tokens)),
        },
    }


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[list[str]]:
    """All ways to make a token of two others, the better token first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for text, id in vocab.items():
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        known = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        for left, right in sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])):
            merges.append((scores[id], len(left), len(right), left, right))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]


_KINDS: Mapping[str, Callable[[GGUF, list[str]], Json]] = {
    "gpt2": _byte_level,
    "gemma4": _gemma4,
    "llama": _scored,
    "t5": _unigrams,
}
