"""Templates and ends of models that say neither in their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.core.end_tokens import end_token_ids
from quire.text.template import ChatTemplate

PICTURE, QUESTION = {"type": "image"}, {"type": "text", "text": "Why?"}
QUERY = "<|md_reserved_0|>query<|md_reserved_1|>Why?<|md_reserved_2|>"
PROMPTS = {
    "falcon_ocr": "<|image|>Why?\n<|OCR_PLAIN|>",
    "falcon_perception": "<|image|>Why?",
    "moondream3": f"<|endoftext|>{QUERY}",
}
AGAIN = {
    "falcon_ocr": "Oh.<|end_of_query|>Why?\n<|OCR_PLAIN|>",
    "falcon_perception": "Oh.<|end_of_query|>Why?",
    "moondream3": f"Oh.{QUERY}",
}


def folder(path: Path, model_type: str) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


@pytest.mark.parametrize("model_type", PROMPTS)
def test_a_question_is_written_as_by_the_publisher(model_type: str, tmp_path: Path) -> None:
    template = ChatTemplate.open(folder(tmp_path, model_type), {"eos_token": "<|endoftext|>"})
    first = {"role": "user", "content": [PICTURE, QUESTION]}
    assert template.render([first]) == PROMPTS[model_type]
    answer = {"role": "assistant", "content": "Oh."}
    again = template.render([first, answer, {"role": "user", "content": "Why?"}])
    assert again == PROMPTS[model_type] + AGAIN[model_type]
    begun = template.render([first, answer], continue_final=True)
    assert begun == PROMPTS[model_type] + "Oh."


@pytest.mark.parametrize(
    ("model_type", "prompt"),
    [
        ("falcon_ocr", "<|image|>Extract the text content from this image.\n<|OCR_PLAIN|>"),
        (
            "moondream3",
            "<|endoftext|><|md_reserved_0|>describe<|md_reserved_1|>normal<|md_reserved_2|>",
        ),
    ],
)
def test_a_picture_alone_is_asked_about(model_type: str, prompt: str, tmp_path: Path) -> None:
    template = ChatTemplate.open(folder(tmp_path, model_type), {})
    assert template.render([{"role": "user", "content": [PICTURE]}]) == prompt


def test_the_files_of_a_model_come_first(tmp_path: Path) -> None:
    (folder(tmp_path, "falcon_ocr") / "chat_template.jinja").write_text("{{ messages | length }}")
    assert ChatTemplate.open(tmp_path, {}).render([{"role": "user", "content": "hi"}]) == "1"


def test_an_end_that_only_published_code_knows(tmp_path: Path) -> None:
    added = [{"id": 263, "content": "<|end_of_query|>"}, {"id": 11, "content": "<|end_of_text|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    assert end_token_ids(folder(tmp_path, "llama")) == {11}
    assert end_token_ids(folder(tmp_path, "falcon_ocr")) == {11, 263}
    # Points, sizes and masks are no text.
    assert end_token_ids(folder(tmp_path, "falcon_perception")) == {11, 263, 240, 241, 262}
    other = {"model_type": "falcon_perception", "coord_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert end_token_ids(tmp_path) == {11, 263, 7, 241, 262}
