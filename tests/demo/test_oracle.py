"""transformers loads the shipped folder, and is the same function as the model that was trained."""

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from training import check, testsets
from training.chat import parse
from training.evaluate import answers

from quire.demo import MODEL_DIR
from quire.demo.skills import load

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(
        MODEL_DIR, dtype=torch.float32
    )
    loaded.eval()
    return loaded


def test_logits_agree(model: Any) -> None:
    mine = check.ours(MODEL_DIR, json.loads((MODEL_DIR / "config.json").read_text()))
    for item in check.samples():
        assert check.difference(item, mine, model) < check.TOLERANCE


def test_the_tokenizer_renders_and_encodes_like_ours() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<bos><|turn>user\nWhat is 12 + 30?<turn|>\n<|turn>model\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_some_held_out_sums_are_right(model: Any) -> None:
    items = [item for item, _ in zip(testsets.held_out("arithmetic"), range(20), strict=False)]
    written = answers(model, items, torch.device("cpu"))
    right = sum(
        parse(text).text == item.answer["content"]
        for item, text in zip(items, written, strict=True)
    )
    assert right >= 19


@pytest.mark.parametrize("skill", ["arithmetic", "json"])
def test_the_shipped_items_equal_the_scripts(skill: str) -> None:
    shipped = load(testsets.FOLDER / f"{skill}.jsonl")
    made = [testsets.skill_item(skill, item) for item in testsets.held_out(skill)]
    assert shipped == made
