"""Tokenizers in other files than `tokenizer.json`, against the libraries that write these."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.cli.models import inspect
from quire.core.byte_alphabet import BYTE_OF
from quire.core.errors import ModelError
from quire.models.tokenizers.conversion import with_tokenizer
from quire.models.weights.loader import open_model
from quire.text.tokenizer import Tokenizer
from tests.support.tiny_models import tiny_model
from tests.text import made

TEXTS = [*made.CORPUS[:5], "", " ", "  a  b ", "\n\n  \n", "don't DON'T 12345", "你好 world"]
WORDS = r"[a-zA-Z]+|[0-9]{1,3}|\s+|[^a-zA-Z0-9\s]+"


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def opened(folder: Path, name: str, content: bytes, config: Mapping[str, Any]) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.open(with_tokenizer(folder))


def trained(**options: Any) -> bytes:
    """Return a SentencePiece model of `made.CORPUS`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(made.CORPUS * 5),
        model_writer=model,
        vocab_size=360,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


AS_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "split_digits": True, **AS_IS},
    "bpe without a space": {"model_type": "bpe", "add_dummy_prefix": False, **AS_IS},
    "unigrams": {"model_type": "unigram"},
    "unigrams as they are": {"model_type": "unigram", **AS_IS},
}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    found = {}
    for name, options in SENTENCEPIECE.items():
        model = trained(**options)
        source = sentencepiece.SentencePieceProcessor(model_proto=model)
        ours = opened(tmp_path_factory.mktemp("pieces"), "tokenizer.model", model, {})
        found[name] = ours, source
    return found


@pytest.mark.parametrize("name", SENTENCEPIECE)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)))
@example(text="a\x85")  # a space to Unicode, and not to SentencePiece
@settings(max_examples=60, deadline=None)
def test_sentencepiece(name: str, text: str, pieces: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, source = pieces[name]
    text = re.sub("[\x00\u2581\ud800-\udfff]|<unk>|</?s>", "", text)
    if name == "unigrams":  # the library drops a no-break space that a mark stands on
        text = "".join(letter for letter in text if not category(letter).startswith("M"))
    ids = source.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    start = [source.bos_id()] if name.startswith("bpe") else []
    assert ours.encode(text) == start + ids
    assert ours.vocab_size == source.get_piece_size()
    assert ours.eos_ids == {source.eos_id()}


def test_files_beside_a_model_name_its_tokens_anew_and_add_some(tmp_path: Path) -> None:
    model = trained(model_type="bpe", **AS_IS)
    unused = sentencepiece.SentencePieceProcessor(model_proto=model).piece_to_id("▁t")
    named = {f"{unused}": {"content": "<|im_end|>", "special": True}, "362": {"content": "<x>"}}
    config = {"added_tokens_decoder": named, "eos_token": "<|im_end|>", "add_bos_token": False}
    ours = opened(tmp_path, "tokenizer.model", model, config)
    assert ours.encode("<|im_end|><x>") == [unused, 362]
    assert ours.eos_ids == {unused}
    assert ours.added_tokens["<|reserved_token_361|>"] == 361
    assert ours.vocab_size == 363


def ranks() -> dict[bytes, int]:
    """Ranks of a trained byte-level BPE's tokens, in the order in which they were learnt."""
    vocab = made.made("byte_level").get_vocab(with_added_tokens=False)
    plain = sorted((id, text) for text, id in vocab.items() if set(text) <= BYTE_OF.keys())
    return {bytes(BYTE_OF[letter] for letter in text): n for n, (_, text) in enumerate(plain)}


def by_ranks(text: str, known: Mapping[bytes, int], words: str) -> list[int]:
    """Encode as tiktoken does: in each word, join the pair whose token has the lowest rank."""
    ids = []
    for word in re.findall(words, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while pairs := [
            (known[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in known
        ]:
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [known[part] for part in parts]
    return ids


def tekken(**changes: Any) -> bytes:
    known = ranks()
    settings = {"pattern": WORDS, "default_num_special_tokens": 30}
    settings |= {"default_vocab_size": len(known) + 30}
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for token, rank in known.items()
    ]
    return json.dumps({"config": settings, "vocab": vocab} | changes).encode()


@given(text=st.one_of(st.sampled_from(TEXTS), st.text("abehlst T1.é\n", max_size=40)))
@settings(max_examples=60, deadline=None)
def test_tekken(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    known = ranks()
    ours = _once(
        "tekken", lambda: opened(tmp_path_factory.mktemp("t"), "tekken.json", tekken(), {})
    )
    assert ours.encode(text) == [1, *(30 + id for id in by_ranks(text, known, WORDS))]
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
    assert ours.encode("[INST]<SPECIAL_25>", add_special_tokens=False) == [3, 25]
    assert ours.eos_ids == {2}


_MADE: dict[str, Tokenizer] = {}


def _once(name: str, make: Callable[[], Tokenizer]) -> Tokenizer:
    if name not in _MADE:
        _MADE[name] = make()
    return _MADE[name]


def test_tekken_lists_its_own_special_tokens(tmp_path: Path) -> None:
    listed = [{"rank": 0, "token_str": "<unk>"}, {"rank": 29, "token_str": "[THINK]"}]
    ours = opened(tmp_path, "tekken.json", tekken(special_tokens=listed), {})
    assert ours.encode("[THINK]a") == [29, 30 + ranks()[b"a"]]


def lines(known: Mapping[bytes, int]) -> bytes:
    return b"".join(
        base64.b64encode(token) + f" {rank}\n".encode() for token, rank in known.items()
    )


MOONSHOT = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]"}


def test_moonshot(tmp_path: Path) -> None:
    known = ranks()
    listed = {f"{len(known) + 3}": {"content": "[BOS]", "special": True}}
    config = MOONSHOT | {"added_tokens_decoder": listed}
    ours = opened(tmp_path, "tiktoken.model", lines(known), config)
    words = r" ?[^\W\d]+|\d{1,3}| ?[^\w\s]+|\s*\n+|\s+(?!\S)|\s+"  # of the texts below
    for text in ("she sells sea shells", "a\n\n b  c", "Größe 🙂", "12345"):
        assert ours.encode(text) == by_ranks(text, known, words), text
    assert ours.encode("[BOS]a") == [len(known) + 3, known[b"a"]]
    assert ours.vocab_size == len(known) + 256


@pytest.mark.parametrize(
    ("name", "content", "config", "said"),
    [
        ("tokenizer.model", b"", {}, "it has no pieces"),
        ("tokenizer.model", b"\x0a\xff\x01a", {}, "breaks off or is damaged at byte 3"),
        ("tokenizer.model", b"\xff" * 20, {}, "a number has no end"),
        ("tokenizer.model", b"\x0a\x04\x0a\x02\xff\xff", {}, "utf-8"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\n", {}, "Git LFS pointer"),
        ("tekken.json", b"{}", {}, "no 'config'"),
        ("tekken.json", tekken(vocab=[{"rank": 0}]), {}, "a token is damaged"),
        ("tekken.json", tekken(vocab=[]), {}, "the ranks are not 0 to"),
        ("tekken.json", tekken(config={}), {}, "config.default_num_special_tokens = None"),
        ("tiktoken.model", b"", {}, "only tokenizer_class 'TikTokenTokenizer' is supported"),
        ("tiktoken.model", b"YQ== 0\nYg==", MOONSHOT, "line 2 is no token and its rank"),
        ("tiktoken.model", b"YQ== 1", MOONSHOT, "the ranks are not 0 to 0"),
        (
            "tiktoken.model",
            b"YQ== 0",
            MOONSHOT | {"added_tokens_decoder": {"0": {"content": "x"}}},
            "token 0 is listed beside it",
        ),
        (
            "tokenizer.model",
            b"\x0a\x03\x0a\x01a",
            {"added_tokens_decoder": {"a": 1}},
            "added_tokens_decoder.a is no token by its id",
        ),
        (  # the ids between would be filled in
            "tokenizer.model",
            b"\x0a\x03\x0a\x01a",
            {"added_tokens_decoder": {"9" * 12: {"content": "x"}}},
            "must be below 16777216",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    name: str, content: bytes, config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        opened(tmp_path, name, content, config)


def test_a_model_opens_with_such_a_file(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny", "llama")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    assert "no tokenizer.json, nor another" in str(inspect(folder, "tiny", "folder").problem)
    (folder / "tekken.json").write_bytes(tekken())
    assert inspect(folder, "tiny", "folder").problem is None
    for _ in range(2):  # the second time over what the first one wrote
        loaded = open_model(str(folder))
        assert Tokenizer.open(loaded.path).encode("a") == [1, 30 + ranks()[b"a"]]
        assert (loaded.path / "config.json").resolve() == (folder / "config.json").resolve()
    (folder / "tekken.json").rename(folder / "other.json")
    (folder / "other.json").write_bytes(b"{}")
    (folder / "tokenizer.model").write_bytes(trained(model_type="bpe", **AS_IS))
    loaded = open_model(str(folder))
    assert not (loaded.path / "tekken.json").exists()
