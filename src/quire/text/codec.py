"""Encoding and decoding by the `tokenizers` library, in this process or another one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import tokenizers

from quire.text.pieces import PieceRule, rule_of

PlainEncode = Callable[[str], list[int]]
"""Encodes text in which some added tokens are split into pieces instead of matched whole."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a tokenizer that do not change. Can be pickled.

    Attributes:
        added: added tokens, which are matched whole, by id.
        size: one more than the highest id.
        rule: how a token's spelling becomes bytes; None if that depends on neighbouring tokens.
        normalizes: whether text is normalised before tokenization.
        specials_are_text: whether special tokens in a text are encoded like other text.
    """

    added: Mapping[int, tokenizers.AddedToken]
    size: int
    rule: PieceRule | None
    normalizes: bool
    specials_are_text: bool


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """One text or two, with special tokens, as a model reads them.

    Attributes:
        types: kind of each token, by the tokenizer's post-processor: mostly the text's number.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...]


def fitting(counts: Sequence[int], most: int) -> list[int]:
    """Shorten one text or two to `most` tokens in all, the longer one first. Of an odd number, the
    longer text keeps one token more, or the second of equal ones.
    """
    if sum(counts) <= most:
        return list(counts)
    if len(counts) == 1:
        return [most]
    short = min(min(counts), most // 2)
    shortened = [short, most - short]
    return shortened if counts[0] <= counts[1] else shortened[::-1]


class Codec(Protocol):
    """The encoding and decoding behind a `Tokenizer`, which documents the methods. Thread-safe."""

    @property
    def traits(self) -> Traits: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_texts(
        self, first: str, second: str | None, most: int | None, keep_end: bool
    ) -> EncodedTexts: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def token_text(self, token_id: int) -> str | None: ...

    def without(self, texts: Collection[str], anchor: str) -> tuple[PlainEncode, Mapping[int, int]]:
        """Return an encoder that matches none of `texts` whole.

        Args:
            texts: spellings of added tokens.
            anchor: a further text that is matched whole as one token.

        Returns:
            The encoder, and a map from its ids of added tokens to their real ids.
        """
        ...


class LocalCodec:
    """A `Codec` in this process.

    Opening a large `tokenizer.json` holds the interpreter's lock for seconds, whatever the thread.

    Attributes:
        backend: the library's tokenizer; must not be changed.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        size = backend.get_vocab_size(with_added_tokens=True)
        self.traits = Traits(
            added,
            max(size, max(added, default=-1) + 1),
            rule_of(backend),
            normalizes=backend.normalizer is not None,
            specials_are_text=backend.encode_special_tokens,
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library's only encode call that does not compute character offsets.
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_texts(
        self, first: str, second: str | None, most: int | None, keep_end: bool
    ) -> EncodedTexts:
        backend, texts = self.backend, [first] if second is None else [first, second]
        parts = backend.encode_batch(texts, add_special_tokens=False)
        if most is not None:
            added = backend.num_special_tokens_to_add(second is not None)
            counts = fitting([len(part.ids) for part in parts], max(0, most - added))
            for part, count in zip(parts, counts, strict=True):
                part.truncate(count, direction="left" if keep_end else "right")
        whole = backend.post_process(parts[0], None if second is None else parts[1])
        return EncodedTexts(tuple(whole.ids), tuple(whole.type_ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def token_text(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def without(self, texts: Collection[str], anchor: str) -> tuple[PlainEncode, Mapping[int, int]]:
        whole = self.backend
        plain = tokenizers.Tokenizer(whole.model)  # shared, not copied
        if whole.normalizer is not None:
            plain.normalizer = whole.normalizer
        if whole.pre_tokenizer is not None:
            plain.pre_tokenizer = whole.pre_tokenizer
        added = self.traits.added
        kept = {token.content: id for id, token in added.items() if token.content not in texts}
        plain.add_tokens([token for token in added.values() if token.content in kept])
        plain.add_tokens([tokenizers.AddedToken(anchor, normalized=False)])
        found = plain.get_added_tokens_decoder()
        renamed = {id: kept[token.content] for id, token in found.items() if token.content in kept}

        def encode(text: str) -> list[int]:
            return plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

        return encode, renamed
