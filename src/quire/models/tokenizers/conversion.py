"""Converts tokenizers in other files to `tokenizer.json`.

Supported are Mistral's `tekken.json`, Moonshot's `tiktoken.model`, and SentencePiece's
`tokenizer.model`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.byte_alphabet import spelled
from quire.core.errors import ModelError
from quire.core.folder import read_object, read_text
from quire.models.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from quire.models.tokenizers.sentencepiece import (
    BPE,
    BYTE,
    CONTROL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    read_sentencepiece,
)
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
from quire.models.weights.made_folder import made_folder

_CONFIG = "tokenizer_config.json"
_IDS = 1 << 24
"""Limit of token ids. Ids that a file leaves out below its highest one are filled in."""
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of files that list none, of version 7 or earlier."""
_MOONSHOT_CLASS, _MOONSHOT_RESERVED = "TikTokenTokenizer", 256


@dataclass(frozen=True, slots=True)
class _Made:
    """A converted tokenizer.

    Attributes:
        file: contents of `tokenizer.json`.
        names: texts of special tokens, by their keys in `tokenizer_config.json`.
    """

    file: Json
    names: Mapping[str, str]


def tokenizer_of(folder: Path) -> str | None:
    """Return the name of the file that holds a model's tokenizer; None if there is none that can be
    read.
    """
    names = ("tokenizer.json", *_READERS)
    return next((name for name in names if (folder / name).is_file()), None)


def with_tokenizer(folder: Path) -> Path:
    """Return the folder, or a copy with a `tokenizer.json` if it has only another tokenizer file.

    The copy is in the user's cache and links to the folder's other files.

    Raises:
        ModelError: the file is damaged or not supported, or the cache cannot be written.
    """
    name = tokenizer_of(folder)
    if name is None or name == "tokenizer.json":
        return folder
    config = read_object(folder / _CONFIG)
    made = _READERS[name](folder / name, config)
    files = {"tokenizer.json": made.file, _CONFIG: {**made.names, **config}}
    links = {each.name: each for each in folder.iterdir() if each.name not in files}
    return made_folder("tokenizers", folder.name, folder, files=files, links=links)


# -- the folder's other files ----------------------------------------------------------------------


def _listed(path: Path, config: Mapping[str, Any]) -> dict[int, Json]:
    """Return the added tokens that a folder's other files list, by id.

    Raises:
        ModelError: a token has no text or no valid id.
    """
    listed: dict[int, Json] = {}
    for text, id in read_object(path.parent / "added_tokens.json").items():
        if not isinstance(id, int) or not 0 <= id < _IDS:
            raise ModelError(
                f"{path.parent / 'added_tokens.json'}: {text!r} has no id below {_IDS}: {id!r}"
            )
        listed[id] = {"content": text, "special": True}
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ModelError(f"{path.parent / _CONFIG}: 'added_tokens_decoder' is no object")
    for number, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        valid = number.isdecimal() and len(number) < 20 and int(number) < _IDS
        if not valid or not isinstance(content, str):
            raise ModelError(
                f"{path.parent / _CONFIG}: added_tokens_decoder.{number} is no token by its id, "
                f"which must be below {_IDS}"
            )
        listed[int(number)] = entry
    return listed


def _fill(listed: dict[int, Json], first: int, end: int) -> None:
    """Name the unused ids from `first` on, up to `end` or the highest listed id."""
    for id in range(first, max(end, *listed, 0)):
        listed.setdefault(id, {"content": f"<|reserved_token_{id}|>", "special": True})


def _added(listed: Mapping[int, Json]) -> list[Json]:
    return [
        added_token(
            id,
            entry["content"],
            special=bool(entry.get("special", False)),
            rstrip=bool(entry.get("rstrip", False)),
        )
        for id, entry in sorted(listed.items())
    ]


def _around(
    config: Mapping[str, Any], names: Mapping[str, str], ids: Mapping[str, int], *, starts: bool
) -> Json | None:
    """Return the rule that adds tokens around texts, from the configuration.

    Args:
        starts: whether texts start with the start token by default.
    """

    def token(name: str, wanted: bool) -> tuple[str, int] | None:
        named = config.get(name, names.get(name))
        text = named.get("content") if isinstance(named, dict) else named
        return (text, ids[text]) if wanted and isinstance(text, str) and text in ids else None

    starts = bool(config.get("add_bos_token", starts))
    return ends(
        token("bos_token", starts), token("eos_token", bool(config.get("add_eos_token", False)))
    )


# -- byte tokens with merge ranks ------------------------------------------------------------------


def _of_ranks(
    ranks: Mapping[bytes, int], first: int, added: Sequence[str], pre: PreTokenizer
) -> tuple[Json, dict[str, int]]:
    """Return the parts of `tokenizer.json`, and the ids of all tokens.

    Args:
        ranks: rank of each token of bytes; pairs that form a token of lower rank are merged first.
        first: id of the token of rank 0.
        added: texts that are matched whole, except those whose ids follow all byte tokens.
    """
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    vocab = {text: id for id, text in enumerate(added)}
    vocab |= {spelled(token): first + rank for token, rank in ranks.items()}
    pairs = [[spelled(left), spelled(right)] for *_, left, right in merges]
    return over_bytes(vocab, pairs, pre), vocab


def _moonshot(path: Path, config: Mapping[str, Any]) -> _Made:
    """Read Moonshot's format: a line per token with its bytes in base64 and its rank; special
    tokens follow.
    """
    kind = config.get("tokenizer_class")
    if kind != _MOONSHOT_CLASS:
        raise ModelError(
            f"{path}: only tokenizer_class {_MOONSHOT_CLASS!r} is supported for this format, "
            f"not {kind!r}"
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate((read_text(path) or "").splitlines(), 1):
        coded, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(coded, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(f"{path}: line {number} is no token and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path}: the ranks are not 0 to {len(ranks) - 1}")
    listed = _listed(path, config)
    if min(listed, default=len(ranks)) < len(ranks):
        raise ModelError(f"{path}: token {min(listed)} is listed beside it, too")
    _fill(listed, len(ranks), len(ranks) + _MOONSHOT_RESERVED)
    parts, ids = _of_ranks(ranks, 0, (), pre=PRE_TOKENIZERS["kimi-k2"])
    ids |= {entry["content"]: id for id, entry in listed.items()}
    return _Made(whole(parts, _added(listed), _around(config, {}, ids, starts=False)), {})


def _tekken(path: Path, config: Mapping[str, Any]) -> _Made:
    """Read Mistral's format: special tokens first, then tokens of bytes by rank."""
    found = read_object(path)
    settings = found.get("config")
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: no 'config'")
    reserved, size = (
        _whole_number(path, settings, name)
        for name in ("default_num_special_tokens", "default_vocab_size")
    )
    pattern = settings.get("pattern")
    if not isinstance(pattern, str):
        raise ModelError(f"{path}: config.pattern = {pattern!r} is no expression")
    listed = [f"<SPECIAL_{id}>" for id in range(reserved)]
    special = found.get("special_tokens")
    if special is None:
        special = [{"rank": id, "token_str": text} for id, text in enumerate(_TEKKEN_SPECIAL)]
    try:
        for entry in special:
            listed[entry["rank"]] = entry["token_str"]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in found["vocab"]}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ModelError(f"{path}: a token is damaged: {error!r}") from error
    ranks = {token: rank for token, rank in ranks.items() if rank < size - reserved}
    if sorted(ranks.values()) != list(range(size - reserved)):
        raise ModelError(f"{path}: the ranks are not 0 to {size - reserved - 1}")
    pre = PreTokenizer((pattern,), whole=True)
    parts, ids = _of_ranks(ranks, reserved, listed, pre=pre)
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    names = {name: text for name, text in usual.items() if text in listed}
    added = [added_token(id, text, special=True) for id, text in enumerate(listed)]
    return _Made(whole(parts, added, _around(config, names, ids, starts=True)), names)


def _whole_number(path: Path, settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _IDS:
        raise ModelError(f"{path}: config.{name} = {value!r} is not a number of tokens")
    return value


# -- SentencePiece ---------------------------------------------------------------------------------


def _sentencepiece(path: Path, config: Mapping[str, Any]) -> _Made:
    """Read SentencePiece's BPE (arXiv:1808.06226) or unigram model (arXiv:1804.10959)."""
    model = read_sentencepiece(path)
    if not model.escapes or not 0 <= model.unknown < len(model.pieces):
        raise ModelError(
            f"{path}: models that keep spaces or have no unknown token are not supported"
        )
    listed: dict[int, Json] = {
        id: {"content": piece.text, "special": piece.kind != USER_DEFINED}
        for id, piece in enumerate(model.pieces)
        if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    listed |= _listed(path, config)
    texts = [piece.text for piece in model.pieces]
    for id, entry in sorted(listed.items()):
        if id < len(texts):  # some files name theirs anew
            texts[id] = entry["content"]
    _fill(listed, len(texts), len(texts))
    if len(set(texts)) < len(texts):
        raise ModelError(f"{path}: two of its tokens have one text")
    scores = [piece.score for piece in model.pieces]
    if model.kind == BPE:
        if model.squeezes or model.charsmap:
            raise ModelError(f"{path}: BPE that changes spaces or characters is not supported")
        merges = scored_merges({text: id for id, text in enumerate(texts)}, scores)
        parts = over_text(texts, merges, model.unknown, prefix=model.prefix)
    elif model.kind == UNIGRAM:
        parts = unigrams(
            zip(texts, scores, strict=True),
            model.unknown,
            prefix=model.prefix,
            squeezes=model.squeezes,
            charsmap=model.charsmap,
            byte_fallback=any(piece.kind == BYTE for piece in model.pieces),
        )
    else:
        raise ModelError(f"{path}: neither BPE nor unigrams, but kind {model.kind}")
    named = {"bos_token": model.start, "eos_token": model.end, "unk_token": model.unknown}
    names = {name: texts[id] for name, id in named.items() if 0 <= id < len(texts)}
    ids = {entry["content"]: id for id, entry in listed.items()}
    around = _around(config, names, ids, starts=model.kind == BPE)
    return _Made(whole(parts, _added(listed), around), names)


_READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], _Made]] = {
    "tekken.json": _tekken,
    "tiktoken.model": _moonshot,
    "tokenizer.model": _sentencepiece,
}
