"""Ends of answers, dialects and the opening of reasoning, as each family publishes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.models.registry import FAMILIES
from quire.text.dialects import choose_dialect
from quire.text.dialects.base import vocabulary_of
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.support.encoders import ENCODERS
from tests.text.published import PUBLISHED, Published

_UNKNOWN = 1_000_000  # above all published ids


def _folder(path: Path, published: Published) -> Path:
    """Return a model folder with the added tokens at their ids, and one token for all other
    words.
    """
    added = {**published.ends, **published.marks}
    if published.thinks:
        added.setdefault("<think>", _UNKNOWN + 1)
    tokens = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, number in sorted(added.items(), key=lambda item: item[1])
    ]
    vocabulary = {**added, "<unk>": _UNKNOWN}
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": tokens,
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        },
        "tokenizer_config.json": {
            "eos_token": next(iter(published.ends), None),
            "chat_template": published.template if published.user else None,
        },
        "generation_config.json": {"eos_token_id": list(published.ends.values())[1:]},
        "config.json": {"model_type": published.model_types[0]},
    }
    for name, value in files.items():
        (path / name).write_text(json.dumps(value))
    return path


CASES = [
    pytest.param(each, model_type, id=f"{model_type}-{each.checkpoint.partition('/')[2]}")
    for each in PUBLISHED
    for model_type in each.model_types
]


def test_every_family_is_among_them() -> None:
    found = {name for each in PUBLISHED for name in each.model_types}
    assert found == FAMILIES.keys() - ENCODERS


@pytest.mark.parametrize(("published", "model_type"), CASES)
def test_an_answer_ends_and_starts_as_published(
    published: Published, model_type: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, published)
    tokenizer = Tokenizer.open(folder)
    template = ChatTemplate.open(folder, tokenizer.special_tokens)

    assert tokenizer.eos_ids == set(published.ends.values())
    dialect = choose_dialect(template.source, model_type)
    assert dialect.name == published.dialect
    if published.user:
        prompt = template.render([{"role": "user", "content": "Why?"}], tools=None)
        assert prompt == published.user.format("Why?") + published.answer
        parser = dialect.parser(tokenizer.encode(prompt), [], vocabulary_of(tokenizer))
        assert (parser.thinking is True) == published.thinks
