"""Held against the `tokenizers` library's own decoding of the whole sequence."""

from __future__ import annotations

import codecs
import itertools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.codec import LocalCodec
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.support.backend import backend_of
from tests.support.work import counted
from tests.text import made

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXT = st.text(max_size=60) | st.lists(
    st.sampled_from([*made.CORPUS[:5], *made.SPECIAL, *made.PLAIN_ADDED, " ", "  ", "🙂", "é"]),
    max_size=6,
).map("".join)


def opened(kind: str) -> Tokenizer:
    return Tokenizer(Path(), LocalCodec(made.made(kind)), {"eos_token": "</s>"})


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
@given(text=TEXT)
@settings(max_examples=60, deadline=None)
def test_joined_pieces_of_any_text_are_the_full_decode(
    kind: str, skip_special: bool, text: str
) -> None:
    tokenizer = opened(kind)
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids, skip_special=skip_special)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip_special)
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_ids_of_a_byte_level_model(data: st.DataObject) -> None:
    tokenizer = opened("byte_level")
    # Some ids are beyond the vocabulary, as those of padded embeddings are.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    joined = "".join(pieces_of(tokenizer, ids))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    raw = b"".join(tokenizer.token_bytes(id) for id in ids if id not in tokenizer.special_ids)
    assert raw.decode("utf-8", "replace") == whole
    # Only a character that was not finished may be missing.
    assert joined == codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    assert whole in (joined, joined + BROKEN)


def byte_ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert None not in ids
    return ids


@pytest.mark.parametrize("kind", ["gemma_like", "llama2_like"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_ids_of_a_byte_fallback_model(kind: str, data: st.DataObject) -> None:
    tokenizer = opened(kind)
    bytes_start = tokenizer.token_id("<0x00>")
    assert bytes_start is not None
    ordinary = st.integers(0, tokenizer.vocab_size + 5).filter(
        lambda id: not bytes_start <= id < bytes_start + 256
    )
    character = st.characters(exclude_categories=["Cs"])
    some = ordinary.map(lambda id: [id]) | character.map(
        lambda c: byte_ids(backend_of(tokenizer), c)
    )
    ids = list(itertools.chain(*data.draw(st.lists(some, max_size=30))))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["gemma_like", "llama2_like"])
@given(raw=st.binary(max_size=12))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text_leave_the_characters_beside_them_whole(
    kind: str, raw: bytes
) -> None:
    tokenizer = opened(kind)
    tail = tokenizer.encode("x", add_special_tokens=False)[-1]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in raw]
    joined = "".join(pieces_of(tokenizer, [tail, *(id for id in ids if id is not None), tail]))
    assert joined.lstrip(" ") == f"x{raw.decode('utf-8', 'replace')}x"


@pytest.mark.parametrize("kind", ["unigram", "word_piece", "without_decoder"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_ids_of_other_models(kind: str, data: st.DataObject) -> None:
    tokenizer = opened(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = opened("gemma_like")
    ids = byte_ids(backend_of(tokenizer), "é🙂")
    assert pieces_of(tokenizer, ids) == ["", "é", "", "", "", "🙂", ""]


@pytest.mark.parametrize("kind", ["byte_level", "gemma_like"])
def test_a_character_cut_off_by_the_end_is_left_out(kind: str) -> None:
    tokenizer = opened(kind)
    ids = tokenizer.encode("ab\U00010348", add_special_tokens=False)  # not in the corpus
    joined = "".join(pieces_of(tokenizer, ids[:-1]))
    assert joined == "ab"


@pytest.mark.parametrize("kind", made.KINDS)
def test_a_text_that_goes_on_from_a_prompt_keeps_its_first_space(kind: str) -> None:
    tokenizer = opened(kind)
    ids = tokenizer.encode("she sells sea shells", add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        detokenizer = Detokenizer(tokenizer, after=ids[:cut])
        text = "".join(map(detokenizer.add, ids[cut:])) + detokenizer.flush()
        assert tokenizer.decode(ids[:cut]) + text == whole


def test_special_tokens_do_not_break_a_character_that_goes_on() -> None:
    tokenizer = opened("gemma_like")
    first, second = byte_ids(backend_of(tokenizer), "é")
    turn = tokenizer.token_id("<turn|>")
    assert turn is not None
    assert "".join(pieces_of(tokenizer, [first, turn, second])) == "é"


def test_special_tokens_are_kept_when_asked_for() -> None:
    tokenizer = opened("byte_level")
    ids = tokenizer.encode("a<turn|>b<think>c")
    assert "".join(pieces_of(tokenizer, ids, skip_special=True)) == "ab<think>c"
    assert "".join(pieces_of(tokenizer, ids, skip_special=False)) == "<s>a<turn|>b<think>c"


def test_decoders_that_work_token_by_token_are_recognised() -> None:
    recognised = {kind for kind in made.KINDS if opened(kind).pieces(skip_special=True) is not None}
    assert recognised == set(made.PIECEWISE)


@pytest.mark.parametrize("kind", made.KINDS)
def test_work_per_token_does_not_grow(kind: str) -> None:
    """The second half of a long answer takes no more calls than the first."""
    tokenizer = opened(kind)
    ids = tokenizer.encode(" ".join(made.CORPUS), add_special_tokens=False) * 8
    detokenizer = Detokenizer(tokenizer)
    half = len(ids) // 2

    def add(part: list[int]) -> int:
        return counted(lambda: [detokenizer.add(token_id) for token_id in part])[1]

    first, second = add(ids[:half]), add(ids[half : 2 * half])
    assert second <= first * 1.1
