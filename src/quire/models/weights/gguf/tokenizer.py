"""Converts the tokenizer in a GGUF file to Hugging Face's files.

`tokenizer.ggml.model` names its kind: `gpt2` is BPE over bytes with merges; `llama` is
SentencePiece's BPE (arXiv:1808.06226), whose merges follow from scores; `t5` is SentencePiece's
unigram model (arXiv:1804.10959).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from quire.core.errors import ModelError
from quire.models.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from quire.models.tokenizers.tokenizer_json import (
    Json,
    added_token,
    ends,
    over_bytes,
    over_text,
    scored_merges,
    unigrams,
    whole,
)
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.metadata import OF_TOKENIZER, WHOLE, WORD, check

log = logging.getLogger("quire.models")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
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
"""Texts of tokens that end an answer even if no key of the file names them, from
llama.cpp's list.
"""
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
"""Special tokens that the converter does not mark as special, so that llama.cpp shows them."""


def tokenizer_files(gguf: GGUF) -> dict[str, Json]:
    """Return the contents of `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        ModelError: the file has no tokenizer, or an unsupported one.
    """
    kind = _key(gguf, "model")
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ModelError(
            f"{gguf.files[0]}: tokenizer.ggml.model = {kind!r} is not supported (known: {known})"
        )
    tokens = _tokens(gguf)
    parts = _KINDS[kind](gguf, tokens)
    named = {name: _text_of(gguf, tokens, key) for name, key in _IDS.items()}
    config: Json = {name: text for name, text in named.items() if text is not None}
    if templates := _templates(gguf):
        config["chat_template"] = templates
    file = whole(parts, _added(gguf, tokens), _ends(gguf, tokens))
    return {"tokenizer.json": file, "tokenizer_config.json": config}


def end_ids(gguf: GGUF) -> list[int]:
    """Return the ids of all tokens that end an answer."""
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
    """Return a tokenizer's key.

    Raises:
        ModelError: the value has the wrong type.
    """
    key = f"tokenizer.ggml.{name}"
    if key not in gguf.metadata:
        return default
    check(gguf.files[0], key, gguf.metadata[key], kind=OF_TOKENIZER.get(name, WHOLE))
    return gguf.metadata[key]


def _kinds(gguf: GGUF, tokens: list[str]) -> list[tuple[str, int]]:
    return list(zip(tokens, _key(gguf, "token_type") or [_NORMAL] * len(tokens), strict=True))


def _tokens(gguf: GGUF) -> list[str]:
    """Return texts by id.

    Raises:
        ModelError: there are no tokens, or lists have different lengths.
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
    """Return the tokens that are matched whole, special or not."""
    kinds = _key(gguf, "token_type") or []
    # Phi-3's added tokens strip the space after them, except for Llama's tokens.
    swallow = gguf.architecture == "phi3" and _key(gguf, "model") == "llama"
    marks = _GEMMA4_MARKS if _key(gguf, "model") == "gemma4" else frozenset()
    return [
        added_token(
            id,
            tokens[id],
            special=kind != _USER_DEFINED or tokens[id] in marks,
            rstrip=swallow and tokens[id] not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for id, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _text_of(gguf: GGUF, tokens: list[str], key: str) -> str | None:
    id = _key(gguf, key)
    return tokens[id] if isinstance(id, int) and 0 <= id < len(tokens) else None


def _ends(gguf: GGUF, tokens: list[str]) -> Json | None:
    """Return the rule that adds tokens to a text's start and end."""
    kind = _key(gguf, "model")
    starts = _pre(gguf).starts if kind == "gpt2" else kind != "t5"
    added = {
        "bos_token_id": bool(_key(gguf, "add_bos_token", starts)),
        "eos_token_id": bool(_key(gguf, "add_eos_token", kind == "t5")),
    }

    def used(key: str) -> tuple[str, int] | None:
        text = _text_of(gguf, tokens, key) if added[key] else None
        return None if text is None else (text, _key(gguf, key))

    return ends(used("bos_token_id"), used("eos_token_id"))


def _templates(gguf: GGUF) -> str | list[Json] | None:
    """Return the chat template, or all of them by name."""
    prefix = "tokenizer.chat_template"
    for key, value in gguf.metadata.items():
        if key == prefix or key.startswith(f"{prefix}."):
            check(gguf.files[0], key, value, kind=WORD)
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


def _byte_level(gguf: GGUF, tokens: list[str]) -> Json:
    pre = _pre(gguf)
    if "tokenizer.ggml.pre" not in gguf.metadata:
        log.warning("%s: no tokenizer.ggml.pre: tokens may differ from training", gguf.files[0])
    return over_bytes({text: id for id, text in enumerate(tokens)}, _pairs(gguf), pre)


def _pairs(gguf: GGUF) -> list[list[str]]:
    """Return the two texts of each merge. They are separated by a space, which may also start the
    first.
    """
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
    prefix = bool(_key(gguf, "add_space_prefix", default=True))
    return _over_text(gguf, tokens, scored_merges(vocab, _need(gguf, "scores")), prefix=prefix)


def _gemma4(gguf: GGUF, tokens: list[str]) -> Json:
    return _over_text(gguf, tokens, _pairs(gguf), prefix=False)


def _over_text(gguf: GGUF, tokens: list[str], merges: list[list[str]], prefix: bool) -> Json:
    unknown = _key(gguf, "unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ModelError(
            f"{gguf.files[0]}: tokenizer.ggml.unknown_token_id = {unknown} is none of "
            f"{len(tokens)} tokens"
        )
    return over_text(tokens, merges, unknown, prefix=prefix)


def _unigrams(gguf: GGUF, tokens: list[str]) -> Json:
    charsmap = _key(gguf, "precompiled_charsmap") or []
    return unigrams(
        zip(tokens, _need(gguf, "scores"), strict=True),
        _key(gguf, "unknown_token_id", 2),
        prefix=bool(_key(gguf, "add_space_prefix", default=True)),
        squeezes=bool(_key(gguf, "remove_extra_whitespaces", default=True)),
        charsmap=bytes(each & 255 for each in charsmap),
        byte_fallback=any(kind == _BYTE for _, kind in _kinds(gguf, tokens)),
    )


_KINDS: Mapping[str, Callable[[GGUF, list[str]], Json]] = {
    "gpt2": _byte_level,
    "gemma4": _gemma4,
    "llama": _scored,
    "t5": _unigrams,
}
