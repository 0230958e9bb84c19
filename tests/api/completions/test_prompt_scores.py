"""Log-probabilities of prompts: `echo` with `logprobs`, and `prompt_logprobs`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import HTTP, blocks
from tests.support.child import Child

PROMPT = "1 2 3 4 5 6 7 8"


def ask(child: Child, **body: Any) -> dict[str, Any]:
    answer = HTTP.post(f"{child.url}/v1/completions", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    result: dict[str, Any] = choice
    return result


def test_an_answer_read_again_as_a_prompt_has_the_same_logprobs(child: Child) -> None:
    first = ask(child, prompt=PROMPT, max_tokens=6, logprobs=2, return_token_ids=True)
    ids = [*first["prompt_token_ids"], *first["token_ids"]]
    again = ask(child, prompt=ids, max_tokens=0, logprobs=2, echo=True)["logprobs"]
    count = len(first["token_ids"])
    assert again["tokens"][-count:] == first["logprobs"]["tokens"]
    wanted = first["logprobs"]["token_logprobs"]
    assert again["token_logprobs"][-count:] == pytest.approx(wanted, abs=1e-4)
    for one, other in zip(
        again["top_logprobs"][-count:], first["logprobs"]["top_logprobs"], strict=True
    ):
        assert one == pytest.approx(other, abs=1e-4)
    assert again["token_logprobs"][0] is None
    assert len(again["token_logprobs"]) == len(again["text_offset"]) == len(ids)


def test_prompts_beside_each_other_and_what_was_generated(child: Child) -> None:
    body = {"prompt": [PROMPT, "x"], "max_tokens": 2, "logprobs": 1, "echo": True}
    answer = HTTP.post(f"{child.url}/v1/completions", json={"temperature": 0, **body}).json()
    alone = ask(child, prompt=PROMPT, max_tokens=2, logprobs=1, echo=True)
    one, short = answer["choices"]
    assert one["text"] == alone["text"]
    assert one["text"].startswith(PROMPT)
    assert one["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
    assert "".join(one["logprobs"]["tokens"]) == one["text"]
    assert len(short["logprobs"]["tokens"]) == 3
    best = [max(tops.values()) for tops in one["logprobs"]["top_logprobs"][-2:]]
    assert best == one["logprobs"]["token_logprobs"][-2:]  # greedy


def streamed(child: Child, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of a stream's chunks."""
    fields = {"temperature": 0, **body, "stream": True}
    read = blocks(f"{child.url}/v1/completions", fields)
    chunks = [json.loads(each.removeprefix("data: ")) for each in read[:-1]]
    return [choice for each in chunks for choice in each["choices"]]


@pytest.mark.parametrize("prompt", ["x", PROMPT, list(range(100, 300))])
def test_streams_have_them_with_the_echo(child: Child, prompt: str | list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "logprobs": 1, "echo": True}
    whole = ask(child, **body)
    read = streamed(child, **body)
    parts = [each["logprobs"] for each in read if each["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [item for part in parts for item in part[name]] == whole["logprobs"][name]
    assert "".join(each["text"] for each in read) == whole["text"]
    # A long prompt is not written in one turn of the event loop.
    assert max(len(part["tokens"]) for part in parts) <= 64


@pytest.mark.parametrize(
    "beside", [{}, {"logprobs": 0}, {"echo": True}, {"return_token_ids": True}]
)
def test_streams_have_vllms_form(child: Child, beside: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "prompt_logprobs": 1, "n": 2, **beside}
    answer = HTTP.post(f"{child.url}/v1/completions", json={"temperature": 0, **body}).json()
    read = streamed(child, **body)
    for whole in answer["choices"]:
        own = [each for each in read if each["index"] == whole["index"]]
        assert "".join(each["text"] for each in own) == whole["text"]
        for name in ("prompt_logprobs", "prompt_token_ids"):
            found = [each[name] for each in own if name in each]
            assert found == ([whole[name]] if name in whole else [])
        count = sum(len(each["logprobs"]["tokens"]) for each in own if each["logprobs"])
        assert count == len(whole["logprobs"]["tokens"]) if whole["logprobs"] else not count


def test_offsets_are_of_the_text_whatever_tokens_are_called(child: Child) -> None:
    body = {"prompt": "naïve 🙂 fox", "max_tokens": 2, "logprobs": 1, "echo": True}
    named = ask(child, **body)
    numbered = ask(child, **body, return_tokens_as_token_ids=True)["logprobs"]
    offsets = named["logprobs"]["text_offset"]
    assert numbered["text_offset"] == offsets
    for name, offset in zip(named["logprobs"]["tokens"], offsets, strict=True):
        assert name.startswith("bytes:") or named["text"].startswith(name, offset)


def test_vllms_form_ranks_each_token(child: Child) -> None:
    choice = ask(child, prompt=PROMPT, max_tokens=1, prompt_logprobs=3, logprobs=0)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(choice["logprobs"]["tokens"]) == 1  # without echo those of the answer alone
    for each in rest:
        assert len(each) in (3, 4)
        best = [entry for entry in each.values() if entry["rank"] == 1]
        assert best[0]["logprob"] == max(entry["logprob"] for entry in each.values())
