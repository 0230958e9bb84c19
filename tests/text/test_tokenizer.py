from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.core.errors import ModelError
from quire.demo import MODEL_DIR
from quire.text import tokenizer as text_tokenizer
from quire.text.tokenizer import Tokenizer
from tests.text import made


def folder(path: Path, kind: str = "byte_level", **files: Any) -> Path:
    """Return a model folder with that tokenizer and these JSON files (named without their
    ending).
    """
    made.made(kind).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_a_configuration_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    folder(tmp_path, config=[1])
    with pytest.raises(ModelError, match=r"config\.json must hold a JSON object, not a list"):
        Tokenizer.open(tmp_path)


def test_encode_adds_the_start_unless_told_not_to(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path, tokenizer_config={"bos_token": "<s>"}))
    ids = tokenizer.encode("the fox")
    assert ids[0] == tokenizer.token_id("<s>")
    assert tokenizer.encode("the fox", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "<s>the fox"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the fox"


def test_a_start_that_a_prompt_spells_out_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path, tokenizer_config={"bos_token": "<s>"}))
    ids = tokenizer.encode("the fox")
    assert tokenizer.encode_prompt("the fox") == ids
    assert tokenizer.encode_prompt("<s>the fox") == ids
    assert tokenizer.encode_prompt("<s><s>the fox") == [ids[0], *ids]
    assert tokenizer.encode_prompt("<s>") == ids[:1]
    assert tokenizer.encode_prompt("the <s>") == [ids[0], *tokenizer.encode("the ")[1:], ids[0]]


def test_surrogates_are_read_as_browsers_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path))
    for spelt, meant in [("a\ud800b", "a\ufffdb"), ("\ud83d\ude42", "🙂"), ("\udc00é", "\ufffdé")]:
        assert tokenizer.decode(tokenizer.encode(spelt, add_special_tokens=False)) == meant


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply(tmp_path: Path) -> None:
    backend = made.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "she sells sea shells"
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_end_ids_come_from_all_three_configurations(tmp_path: Path) -> None:
    backend = made.made("byte_level")
    turn, think = backend.token_to_id("<turn|>"), backend.token_to_id("<think>")
    tokenizer = Tokenizer.open(
        folder(
            tmp_path,
            tokenizer_config={"eos_token": "</s>"},
            generation_config={"eos_token_id": [turn]},
            config={"eos_token_id": None, "text_config": {"eos_token_id": think}},
        )
    )
    assert tokenizer.eos_ids == {backend.token_to_id("</s>"), turn, think}


def test_special_tokens_map_is_read_when_the_configuration_lists_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(
        folder(
            tmp_path,
            tokenizer_config={"eos_token": "<turn|>"},
            special_tokens_map={"eos_token": {"content": "</s>", "lstrip": False}},
        )
    )
    assert tokenizer.special_tokens["eos_token"] == "</s>"


def test_thousands_of_tokens_are_added_in_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes as long as there are tokens, and holds the interpreter."""
    calls: list[int] = []

    class Counting:
        def __init__(self, backend: tokenizers.Tokenizer) -> None:
            self.backend = backend

        def add_tokens(self, tokens: list[tokenizers.AddedToken]) -> int:
            calls.append(len(tokens))
            return self.backend.add_tokens(tokens)

        def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
            return self.backend.get_added_tokens_decoder()

    add = text_tokenizer._add_tokens
    monkeypatch.setattr(text_tokenizer, "_add_tokens", lambda b, *rest: add(Counting(b), *rest))  # type: ignore[arg-type]
    first = made.made("byte_level").get_vocab_size()
    listed = {
        str(first + i): {"content": f"<unused{i}>", "special": i % 2 == 0} for i in range(300)
    }
    extra = [f"<extra{i}>" for i in range(50)]
    config = {"added_tokens_decoder": listed, "extra_special_tokens": [*extra, "<unused7>"]}
    tokenizer = Tokenizer.open(folder(tmp_path, tokenizer_config=config))
    assert calls == [300, 50]
    ids = tokenizer.encode("<unused299><extra49>", add_special_tokens=False)
    assert ids[-2:] == [first + 299, first + 349]
    assert {first + 4, first + 349} <= tokenizer.special_ids
    assert first + 5 not in tokenizer.special_ids


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    size = made.made("byte_level").get_vocab_size()
    tokenizer = Tokenizer.open(
        folder(
            tmp_path,
            tokenizer_config={
                "added_tokens_decoder": {str(size): {"content": "<new>", "special": False}},
                "image_token": "<|image|>",
                "extra_special_tokens": ["<|extra|>"],
            },
        )
    )
    ids = tokenizer.encode("a<new><|image|><|extra|>", add_special_tokens=False)
    assert ids[1:] == [size, size + 1, size + 2]
    assert tokenizer.vocab_size == size + 3
    assert {size + 1, size + 2} <= tokenizer.special_ids
    assert size not in tokenizer.special_ids
    assert tokenizer.added_tokens["<new>"] == size
    assert tokenizer.special_tokens["image_token"] == "<|image|>"


@pytest.mark.parametrize("kind", made.PIECEWISE)
def test_the_bytes_of_tokens_join_to_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path, kind))
    text = "sea shells in total" + ("" if kind == "unigram" else " 🙂é")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


def test_a_part_of_a_character_has_bytes_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path, "gemma_like"))
    token_id = tokenizer.token_id("<0xC3>")
    assert token_id is not None
    assert tokenizer.token_bytes(token_id) == b"\xc3"
    assert tokenizer.token_text(token_id) == "<0xC3>"


def test_bytes_where_the_decoder_looks_at_neighbours(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path, "word_piece"))
    token_id = tokenizer.encode("fox", add_special_tokens=False)[0]
    assert tokenizer.token_bytes(token_id).decode() == tokenizer.decode([token_id])


def test_a_long_text_is_counted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path))
    text = "The quick brown fox. " * 20_000
    exact = len(tokenizer.encode(text, add_special_tokens=False))
    encoded: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **more: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    assert 0.99 * exact <= tokenizer.count_at_least(text, len(text)) <= exact
    assert max(encoded) <= 1 << 16
    assert sum(encoded) == len(text)
    encoded.clear()
    assert 1000 < tokenizer.count_at_least(text, 1000) <= exact
    assert len(encoded) == 1  # no further than needed


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"eos_token": 5}, "'eos_token' is 5, not a token"),
        ({"bos_token": {"special": True}}, "'bos_token' is {'special': True}, not a token"),
        ({"image_token": {}}, "'image_token' is {}, not a token"),
        ({"extra_special_tokens": {"a": None}}, "'extra_special_tokens.a' is None, not a token"),
        ({"extra_special_tokens": [5]}, "'extra_special_tokens.0' is 5, not a token"),
        ({"added_tokens_decoder": {"9": {}}}, "'added_tokens_decoder.9' is {}, not a token"),
        ({"added_tokens_decoder": {"x": "a"}}, "'added_tokens_decoder' does not go by token ids"),
        ({"added_tokens_decoder": ["a"]}, "'added_tokens_decoder' does not go by token ids"),
    ],
)
def test_what_is_no_token_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    model = folder(tmp_path)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=re.escape(f"tokenizer_config.json: {said}")):
        Tokenizer.open(model)


def test_a_listed_token_may_be_its_text_alone(tmp_path: Path) -> None:
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path)
    listed = {"added_tokens_decoder": {"9999": "<mine>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(listed))
    assert "<mine>" in Tokenizer.open(tmp_path).added_tokens
