"""Tokenizers in GGUF files against those that they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as protocol

from quire.core.errors import ModelError
from quire.models.tokenizers.pretokenizers import PRE_TOKENIZERS
from quire.models.weights.gguf.folder import as_folder
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.support.gguf_files import write_tokenizer
from tests.text import made

TEXTS = [*made.CORPUS[:5], "a <think> b</think>  c", "</s><|turn>x<turn|>", "", " ", "\n\n  \n"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def _writer(path: Path) -> gguf.GGUFWriter:
    """Return a file of one layer without weights that matter."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key in ("block_count", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    for key in ("embedding_length", "context_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 32)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((512, 32), np.float32))
    return writer


def _finished(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return as_folder(path)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder, known = tmp_path_factory.mktemp("tokenizers"), {}
    for kind in ("byte_level", "llama2_like", "gemma_like"):
        path = folder / f"{kind}.gguf"
        writer = _writer(path)
        write_tokenizer(writer, made.made(kind))
        known[kind] = Tokenizer.open(_finished(writer, path))
    writer = _writer(folder / "merges.gguf")
    write_tokenizer(writer, made.made("gemma_like"), merges=True)
    known["merges"] = Tokenizer.open(_finished(writer, folder / "merges.gguf"))
    return known


@pytest.mark.parametrize("kind", ["byte_level", "llama2_like", "gemma_like", "merges"])
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)))
@settings(max_examples=60, deadline=None)
def test_same_ids_and_texts(kind: str, text: str, opened: dict[str, Tokenizer]) -> None:
    source, ours = made.made("gemma_like" if kind == "merges" else kind), opened[kind]

    assert ours.encode(text) == source.encode(text).ids
    ids = source.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special_tokens=False) == ids
    for skip in (True, False):
        whole = source.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == whole


@pytest.fixture(scope="module")
def unigrams(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """Return a SentencePiece model as its own library cuts by it, and its GGUF file."""
    folder = tmp_path_factory.mktemp("unigrams")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(made.CORPUS * 20),
        model_prefix=str(folder / "made"),
        vocab_size=420,
        model_type="unigram",
        byte_fallback=True,
        pad_id=3,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    source = sentencepiece.SentencePieceProcessor(model_file=str(folder / "made.model"))
    read = protocol.ModelProto()
    read.ParseFromString((folder / "made.model").read_bytes())
    path = folder / "unigrams.gguf"
    writer = _writer(path)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.piece for piece in read.pieces])
    writer.add_token_scores([piece.score for piece in read.pieces])
    writer.add_token_types([piece.type for piece in read.pieces])
    writer.add_add_space_prefix(read.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(read.normalizer_spec.remove_extra_whitespaces)
    writer.add_precompiled_charsmap(read.normalizer_spec.precompiled_charsmap)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return source, Tokenizer.open(_finished(writer, path))


@given(text=st.one_of(st.sampled_from(TEXTS[:6]), st.text("abc eé東🙂ﬁ①  ", max_size=40)))
@settings(max_examples=60, deadline=None)
def test_unigrams_cut_as_sentencepiece_does(text: str, unigrams: tuple[Any, Tokenizer]) -> None:
    source, ours = unigrams

    assert ours.encode(text) == [*source.encode(text), 2]
    assert ours.encode(text, add_special_tokens=False) == source.encode(text)
    assert ours.decode(source.encode(text)) == source.decode(source.encode(text))


def test_special_tokens_are_known(opened: dict[str, Tokenizer]) -> None:
    source = made.made("byte_level")
    for tokenizer in opened.values():
        named = tokenizer.special_tokens
        assert named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special = {source.token_to_id(text) for text in made.SPECIAL}
    assert opened["byte_level"].special_ids == special
    assert set(made.PLAIN_ADDED) <= opened["byte_level"].added_tokens.keys()


def test_templates_ends_and_sampling_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = _writer(path)
    tokens = ["a", "b", "ab", "<s>", "</s>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 3 + [3] * 6)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_chat_template(
        [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    )
    writer.add_float32("general.sampling.temp", 0.6)

    folder = _finished(writer, path)
    tokenizer = Tokenizer.open(folder)
    template = ChatTemplate.open(folder, tokenizer.special_tokens)

    messages = [{"role": "user", "content": "ab"}]
    assert template.render(messages) == "<s><|turn>user: ab"
    assert template.render(messages, tools=[{"type": "function"}]) == "tools"
    assert tokenizer.encode("ab") == [2]  # the file asks for no start
    assert tokenizer.eos_ids == {4, 5, 7, 8}  # <|end|> ends a message there, not an answer
    assert '"temperature": 0.6' in (folder / "generation_config.json").read_text()


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_way_to_cut_keeps_texts_whole(name: str, tmp_path: Path) -> None:
    """Each is a valid expression that loses nothing; merges do not cross its cuts."""
    path = tmp_path / "model.gguf"
    writer = _writer(path)
    alphabet = sorted(made.made("byte_level").get_vocab(), key=len)[:256]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([*alphabet, "aĠ", "bb"])
    writer.add_token_types([1] * 258)
    writer.add_token_merges(["a Ġ", "b b"])

    tokenizer = Tokenizer.open(_finished(writer, path))

    for text in (*made.CORPUS[:5], "It'S 12345", "a b bb"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("bb a b")
    assert ids[:1] == [257]
    assert (256 in ids) == (name in ("exaone-moe", "superbpe"))  # which leave words together


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model = 'bert'"),
        ({"pre": "nonesuch"}, "tokenizer.ggml.pre = 'nonesuch'"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    writer = _writer(path)
    given = {"model": "gpt2", "pre": "qwen2", "merges": ["a b"]} | changes
    writer.add_tokenizer_model(given["model"])
    writer.add_tokenizer_pre(given["pre"])
    writer.add_token_list(["a", "b", "ab"])
    if given["merges"]:
        writer.add_token_merges(given["merges"])
    with pytest.raises(ModelError, match=named):
        _finished(writer, path)
