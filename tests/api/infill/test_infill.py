"""Gaps in texts: llama.cpp's `/infill` and `suffix` of completions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from quire.core.config import ServerConfig
from quire.demo import MODEL_DIR
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve, Served, start
from tests.support.scripted_engine import Script

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>")


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server whose tokenizer has Qwen Coder's marks."""
    folder = tmp_path_factory.mktemp("coder")
    for path in MODEL_DIR.glob("*.json*"):
        shutil.copy(path, folder)
    shutil.copy(MODEL_DIR / "chat_template.jinja", folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    kind = described["added_tokens"][-1] | {"special": True}
    first = Tokenizer.open(MODEL_DIR).vocab_size
    described["added_tokens"] += [
        kind | {"id": first + number, "content": name} for number, name in enumerate(MARKS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with ExitStack() as stack:
        yield start(stack, Tokenizer.open(folder), ServerConfig(), folder)


def ask(served: Served, path: str, body: dict[str, Any], said: str = "b") -> Any:
    served.settle()
    tokens = tuple(served.tokenizer.encode(said, add_special_tokens=False))
    served.engine.reset(lambda _: Script(tokens))
    return HTTP.post(f"{served.url}{path}", json=body)


def prompt_of(served: Served) -> str:
    (request,) = served.engine.requests
    return served.tokenizer.decode(request.prompt)


def start_of(served: Served) -> str:
    return served.tokenizer.decode(served.tokenizer.encode(""))


def test_texts_around_a_gap_stand_between_the_marks(coder: Served) -> None:
    body = {
        "input_prefix": "a = ",
        "input_suffix": "c",
        "input_extra": [{"filename": "x.py", "text": "one"}, {"text": "two"}],
        "prompt": "(",
        "n_predict": 7,
        "samplers": ["top_k"],
    }
    answer = ask(coder, "/infill", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-quire-ignored-fields"] == "samplers"
    context = "<|file_sep|>x.py\none<|file_sep|>\ntwo<|file_sep|>"
    gap = "<|fim_prefix|>a = <|fim_suffix|>c<|fim_middle|>("
    assert prompt_of(coder) == start_of(coder) + context + gap
    (request,) = coder.engine.requests
    assert request.max_tokens == 7
    ends = {coder.tokenizer.token_id(name) for name in ("<|file_sep|>", "<|fim_pad|>")}
    assert ends <= request.stop_token_ids
    told = answer.json()
    assert (told["content"], told["stop"], told["stop_type"]) == ("b", True, "eos")
    assert told["tokens_evaluated"] == len(request.prompt)


def test_a_stream_says_the_same(coder: Served) -> None:
    body = {"input_prefix": "a", "input_suffix": "c"}
    whole = ask(coder, "/infill", body, "one two three").json()
    stream = ask(coder, "/infill", body | {"stream": True}, "one two three").text
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"] == "one two three"
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1] == whole | {"content": "", "tokens_cached": chunks[-1]["tokens_cached"]}


def test_completions_fill_gaps_before_a_suffix(coder: Served) -> None:
    answer = ask(coder, "/v1/completions", {"prompt": "a", "suffix": "c", "echo": True})
    assert answer.json()["choices"][0]["text"] == "ab"
    gap = "<|fim_prefix|>a<|fim_suffix|>c<|fim_middle|>"
    assert prompt_of(coder) == start_of(coder) + gap


def test_ollama_fills_gaps_before_a_suffix(coder: Served) -> None:
    body = {"prompt": "a", "suffix": "c", "system": "Be brief.", "stream": False}
    answer = ask(coder, "/api/generate", body)
    assert answer.json()["response"] == "b"
    assert answer.headers["x-quire-ignored-fields"] == "system"
    gap = "<|fim_prefix|>a<|fim_suffix|>c<|fim_middle|>"
    assert prompt_of(coder) == start_of(coder) + gap
    (request,) = coder.engine.requests
    assert coder.tokenizer.token_id("<|fim_pad|>") in request.stop_token_ids


def test_models_without_the_marks_refuse_by_name(serve: Serve) -> None:
    answer = HTTP.post(f"{serve().url}/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_suffix")
    answer = HTTP.post(f"{serve().url}/infill", json={"input_prefix": "a", "n": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
