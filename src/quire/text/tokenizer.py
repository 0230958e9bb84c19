"""Text to token ids and back, from the files of a model folder, with the `tokenizers` library.

It treats the files as `AutoTokenizer` of transformers 5 does, so that ids and texts agree:
`tokenizer.json` is the tokenizer, start and end tokens are added as its post-processor says, and
`tokenizer_config.json` (or, if that lists no added tokens, `special_tokens_map.json`) may name
or add special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from quire.core.end_tokens import end_token_ids
from quire.core.errors import ModelError
from quire.core.folder import read_bytes, read_object
from quire.text.codec import Codec, EncodedTexts, LocalCodec
from quire.text.pieces import PieceTable

_PIECE, _AT_A_CUT = 1 << 16, 16
"""Characters that `count_at_least` encodes at once, and the most tokens by which a cut changes the
count. The library takes some 400 bytes a token while it encodes.
"""

_CONFIG = "tokenizer_config.json"
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A model's tokenizer. Immutable once open; any thread may use it.

    Attributes:
        path: the model folder.
        codec: encodes and decodes, here or in another process.
        special_tokens: texts of named special tokens, e.g. `bos_token`, for templates.
        special_ids: ids of all tokens marked special.
        eos_ids: ids that end an answer, from `generation_config.json`, `config.json` and the
            tokenizer together.
        eos_id: id of the tokenizer's own end token; None if it has none.
        vocab_size: one more than the highest id; a model's embedding may have more rows.
    """

    def __init__(
        self,
        path: Path,
        codec: Codec,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.path = path
        self.codec = codec
        self.special_tokens = MappingProxyType(dict(special_tokens))
        traits = codec.traits
        self._added = MappingProxyType({token.content: id for id, token in traits.added.items()})
        self.special_ids = frozenset(id for id, token in traits.added.items() if token.special)
        eos = self.special_tokens.get("eos_token")
        self.eos_id = None if eos is None else codec.token_id(eos)
        own = (self.eos_id,) if self.eos_id is not None else ()
        self.eos_ids = frozenset((*own, *eos_ids))
        self.vocab_size = traits.size
        rule, spelling = traits.rule, codec.token_text
        self._shown = None if rule is None else PieceTable(spelling, rule, self.special_ids)
        self._all = None if rule is None else PieceTable(spelling, rule, frozenset())

    @classmethod
    def open(cls, folder: str | Path) -> Tokenizer:
        """Open the tokenizer of a model folder.

        Raises:
            ModelError: `tokenizer.json` is missing, or a file cannot be read.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json (nor another tokenizer that Quire reads)"
            )
        data = read_bytes(file)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise ModelError(f"cannot read {file}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _config_of(folder)
        _check(folder, config)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        named = _named_tokens(config)
        _add_tokens(backend, config, named)
        special_tokens = {name: _content(token) for name, token in named.items()}
        return cls(folder, LocalCodec(backend), special_tokens, eos_ids=end_token_ids(folder))

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the added tokens, special or not, by text."""
        return self._added

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Takes about a microsecond a token and releases the interpreter's lock. A lone surrogate,
        which JSON can express but UTF-8 cannot, is read as U+FFFD.

        Args:
            add_special_tokens: whether to add what the tokenizer's post-processor adds, such as a
                start token. False for rendered chat templates, which already contain it.
        """
        return self.codec.encode(_readable(text), add_special_tokens)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with what the tokenizer's post-processor adds.

        A start token that the text spells out is not added once more: prompts that are pasted from
        a chat template begin with it.
        """
        ids, start = self.encode(text), self.special_tokens.get("bos_token")
        if start and text.startswith(start):
            spelled = self.encode(text, add_special_tokens=False)
            if ids[:1] == spelled[:1] and ids[1 : 1 + len(spelled)] == spelled:
                return ids[1:]
        return ids

    def encode_texts(
        self,
        first: str,
        second: str | None = None,
        *,
        most: int | None = None,
        keep_end: bool = False,
    ) -> EncodedTexts:
        """Return a text, or a pair of texts, as the tokenizer's post-processor joins them.

        Args:
            most: the most tokens, special ones included. Longer texts are cut; of a pair the longer
                one first.
            keep_end: whether a text's last tokens are kept, not its first.
        """
        if second is not None:
            second = _readable(second)
        return self.codec.encode_texts(_readable(first), second, most, keep_end=keep_end)

    def count_at_least(self, text: str, enough: int) -> int:
        """Return a lower bound of a text's number of tokens, in memory that does not grow with the
        text.

        The text is encoded piece by piece until the count exceeds `enough`. Each piece lowers the
        bound by at most a few tokens.
        """
        count = 0
        for start in range(0, len(text), _PIECE):
            piece = self.encode(text[start : start + _PIECE], add_special_tokens=False)
            count += max(0, len(piece) - _AT_A_CUT)
            if count > enough:
                break
        return count

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of a whole sequence. To decode tokens as they arrive, use a
        `Detokenizer`.
        """
        return self.codec.decode(ids, skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary; None if unknown."""
        return self.codec.token_id(token)

    def token_text(self, token_id: int) -> str | None:
        """Return a token's spelling in the vocabulary (not its text); None if unknown."""
        return self.codec.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds within a text; empty for an unknown id."""
        if self._all is None:
            return self.decode([token_id]).encode()
        piece = self._all[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def pieces(self, *, skip_special: bool) -> PieceTable | None:
        """Return the text of each token; None if the decoder does not work token by token."""
        return self._shown if skip_special else self._all


def _readable(text: str) -> str:
    """Return a text with lone surrogates replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _config_of(folder: Path) -> dict[str, Any]:
    """Return `tokenizer_config.json`, completed as transformers does for older files."""
    config = read_object(folder / _CONFIG)
    if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    if "added_tokens_decoder" not in config:
        special = read_object(folder / "special_tokens_map.json")
        if "additional_special_tokens" in special:
            special.setdefault("extra_special_tokens", special.pop("additional_special_tokens"))
        config |= special
    return config


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise `ModelError` if an entry for a token is neither a text nor a token's description."""
    extra, listed = config.get("extra_special_tokens"), config.get("added_tokens_decoder", {})
    found = {
        name: token
        for name, token in config.items()
        if (name in _NAMED and token is not None)
        or (name.endswith("_token") and isinstance(token, dict))
    }
    if isinstance(extra, dict | list):
        own = extra.items() if isinstance(extra, dict) else enumerate(extra)
        found |= {f"extra_special_tokens.{name}": token for name, token in own}
    if not isinstance(listed, dict) or not all(map(str.isdecimal, listed)):
        raise ModelError(f"{folder / _CONFIG}: 'added_tokens_decoder' does not go by token ids")
    found |= {f"added_tokens_decoder.{id}": token for id, token in listed.items()}
    for name, token in found.items():
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            raise ModelError(f"{folder / _CONFIG}: '{name}' is {token!r}, not a token")


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str | dict[str, Any]]:
    """Return the tokens that the configuration names: the usual ones, then the model's own."""
    own = {
        name: token
        for name, token in config.items()
        if name not in _NAMED and name.endswith("_token") and isinstance(token, str | dict)
    }
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        own |= extra
    usual = {name: config[name] for name in _NAMED if config.get(name) is not None}
    return usual | own


def _add_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    named: Mapping[str, str | dict[str, Any]],
) -> None:
    """Add the tokens that only the configuration lists to the tokenizer."""
    names = {_content(token) for token in named.values()}
    listed = config.get("added_tokens_decoder", {})
    in_order = sorted(listed.items(), key=lambda item: int(item[0]))
    # One call for all: each call scans all added tokens, and some models have thousands.
    backend.add_tokens(
        [_added_token(entry, special=_content(entry) in names) for _, entry in in_order]
    )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens")
    missing: dict[str, tokenizers.AddedToken] = {}
    for token in [*named.values(), *(extra if isinstance(extra, list) else ())]:
        if _content(token) not in known:
            missing.setdefault(_content(token), _added_token(token, special=True))
    backend.add_tokens(list(missing.values()))


def _added_token(entry: str | dict[str, Any], *, special: bool) -> tokenizers.AddedToken:
    """Return the library's object for an entry; `special` marks it as special in any case."""
    if isinstance(entry, str):
        return tokenizers.AddedToken(entry, special=special)
    flags = {
        name: bool(entry[name])
        for name in ("single_word", "lstrip", "rstrip", "normalized")
        if name in entry
    }
    marked = special or bool(entry.get("special", False))
    return tokenizers.AddedToken(entry["content"], special=marked, **flags)


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
