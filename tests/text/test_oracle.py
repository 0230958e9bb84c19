"""Held against transformers' AutoTokenizer on the same folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import RequestError
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.text import made
from tests.text.conversations import CONVERSATIONS, TEMPLATES, TOOL

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": NAMED,
    "bos asked for": {**NAMED, "add_bos_token": True, "add_eos_token": True},
    "objects": {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}},
    "new tokens": {
        **NAMED,
        "pad_token": "<pad>",
        "image_token": "<|image|>",
        "additional_special_tokens": ["<|extra|>", "<think>"],
    },
    "named extras": {**NAMED, "extra_special_tokens": {"eot_token": "<turn|>"}},
    "flags in the configuration": {
        **NAMED,
        "added_tokens_decoder": {
            "{<think>}": {"content": "<think>", "special": True, "rstrip": True}
        },
    },
    "special tokens split": {**NAMED, "split_special_tokens": True},
}
TEXTS = [*made.CORPUS[:5], "a <think> b</think>  c", "<|turn>x<turn|></s><|extra|><|image|>", ""]
EMBEDDED = Path(__file__).parents[2] / "src" / "quire" / "demo" / "model"


def write(path: Path, kind: str, config: dict[str, Any]) -> Path:
    backend = made.made(kind)
    backend.save(str(path / "tokenizer.json"))
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    text = text.replace("{<think>}", str(backend.token_to_id("<think>")))
    (path / "tokenizer_config.json").write_text(text)
    return path


@pytest.mark.parametrize("kind", ["byte_level", "gemma_like", "llama2_like", "unigram"])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_ids_and_texts(kind: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, kind, CONFIGS[name])
    ours = Tokenizer.open(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    assert ours.eos_id == theirs.eos_token_id
    assert dict(ours.added_tokens) == theirs.get_added_vocab()
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == decoded


@pytest.mark.parametrize("name", TEMPLATES)
def test_same_rendered_text(name: str, tmp_path: Path) -> None:
    write(tmp_path, "byte_level", CONFIGS["plain"])
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    tokenizer = Tokenizer.open(tmp_path)
    compare(ChatTemplate.open(tmp_path, tokenizer.special_tokens), tmp_path)


def compare(ours: ChatTemplate, path: Path) -> None:
    """Every conversation, with and without tools, thinking and generation prompt."""
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    agreed = 0
    for messages in CONVERSATIONS.values():
        for tools in (None, [TOOL], []):
            for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
                for prompt in (True, False):
                    kwargs = {"tools": tools, "add_generation_prompt": prompt, **variables}
                    try:
                        text = theirs.apply_chat_template(messages, tokenize=False, **kwargs)
                    except Exception:  # whatever theirs raises, ours must refuse
                        with pytest.raises(RequestError):
                            ours.render(messages, **kwargs)
                        continue
                    assert ours.render(messages, **kwargs) == text
                    agreed += 1
    assert agreed >= 100


@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=20)},
            optional={"reasoning": st.none() | st.text(max_size=9), "name": st.none()},
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=25, deadline=None)
def test_same_rendered_text_of_random_messages(
    messages: list[dict[str, Any]], shared_folder: Path
) -> None:
    ours = ChatTemplate.open(shared_folder, Tokenizer.open(shared_folder).special_tokens)
    theirs = transformers.AutoTokenizer.from_pretrained(shared_folder)
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == text
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert Tokenizer.open(shared_folder).encode(text, add_special_tokens=False) == ids


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write(tmp_path_factory.mktemp("model"), "byte_level", CONFIGS["plain"])
    (path / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    return path


def test_continuing_the_last_message(shared_folder: Path) -> None:
    messages = [*CONVERSATIONS["one question"], {"role": "assistant", "content": "It is "}]
    theirs = transformers.AutoTokenizer.from_pretrained(shared_folder)
    text = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ours = ChatTemplate.open(shared_folder, NAMED)
    assert ours.render(messages, continue_final=True) == text


@pytest.mark.skipif(not (EMBEDDED / "tokenizer.json").exists(), reason="the model is not there")
def test_the_embedded_model() -> None:
    ours = Tokenizer.open(EMBEDDED)
    theirs = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    assert ours.added_tokens == theirs.get_added_vocab()
    compare(ChatTemplate.open(EMBEDDED, ours.special_tokens), EMBEDDED)
