"""Assembles `tokenizer.json` from parts that other formats give."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.models.tokenizers.pretokenizers import PreTokenizer

SPACE = "\u2581"
Json = dict[str, Any]

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


def whole(parts: Json, added: Sequence[Json], around: Json | None) -> Json:
    """Return the contents of `tokenizer.json`.

    Args:
        parts: result of `over_bytes`, `over_text` or `unigrams`.
        added: results of `added_token`.
        around: result of `ends`.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "post_processor": around,
    } | parts


def added_token(id: int, text: str, *, special: bool, rstrip: bool = False) -> Json:
    """Return the entry of a token that is matched whole."""
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    return {"id": id, "content": text, "special": special, "rstrip": rstrip, **flags}


def ends(start: tuple[str, int] | None, end: tuple[str, int] | None) -> Json | None:
    """Return the rule that adds a token (text and id) at each end of a text; None adds none."""
    if start is None and end is None:
        return None

    def piece(token: tuple[str, int] | None, sequence: int) -> list[Json]:
        return [] if token is None else [{"SpecialToken": {"id": token[0], "type_id": sequence}}]

    def around(name: str, sequence: int) -> list[Json]:
        body = {"Sequence": {"id": name, "type_id": sequence}}
        return [*piece(start, sequence), body, *piece(end, sequence)]

    used = [token for token in (start, end) if token is not None]
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]} for text, id in used},
    }


def over_bytes(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], pre: PreTokenizer
) -> Json:
    """Return the parts of a BPE model over bytes, spelled in GPT-2's alphabet."""
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.components()},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": _BPE | {"ignore_merges": pre.whole, "vocab": dict(vocab), "merges": list(merges)},
    }


def over_text(
    tokens: Sequence[str], merges: Sequence[Sequence[str]], unknown: int, *, prefix: bool
) -> Json:
    """Return the parts of a BPE model over characters, with bytes as fallback.

    Args:
        unknown: id of the unknown token.
        prefix: whether a space is put before each text.
    """
    return {
        "normalizer": {"type": "Sequence", "normalizers": _spelled_spaces(prefix)},
        "pre_tokenizer": None,
        "decoder": _text_decoder(prefix),
        "model": _BPE
        | {
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: id for id, text in enumerate(tokens)},
            "merges": list(merges),
        },
    }


def _spelled_spaces(prefix: bool) -> list[Json]:
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return [{"type": "Prepend", "prepend": SPACE}, spaces] if prefix else [spaces]


def _text_decoder(prefix: bool) -> Json:
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": back}


def unigrams(
    tokens: Iterable[tuple[str, float]],
    unknown: int,
    *,
    prefix: bool,
    squeezes: bool,
    charsmap: bytes,
    byte_fallback: bool,
) -> Json:
    """Return the parts of a unigram model, which splits a text into its most likely tokens.

    Args:
        tokens: texts with their log likelihoods.
        squeezes: whether spaces at the end are dropped and several become one.
        charsmap: SentencePiece's normalisation rules; empty for none.
        byte_fallback: whether characters without a token become bytes.
    """
    normalizers: list[Json] = []
    if charsmap:
        coded = base64.b64encode(charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": coded})
    if squeezes:
        normalizers += [
            # No other space: what the rules for characters leave of them stays.
            {"type": "Replace", "pattern": {"Regex": " +\\z"}, "content": ""},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE},
        ]
        cut: Json | None = {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "always" if prefix else "never",
            "split": True,
        }
    else:
        normalizers += _spelled_spaces(prefix)
        cut = None
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": cut,
        "decoder": _text_decoder(prefix),
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [list(pair) for pair in tokens],
            "byte_fallback": byte_fallback,
        },
    }


def scored_merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return all merges of two tokens into one, better tokens first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for text, id in vocab.items():
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        known = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        for left, right in sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])):
            merges.append((scores[id], len(left), len(right), left, right))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]
