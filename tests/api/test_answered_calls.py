"""Results of tools are paired with the calls that they answer, in every protocol."""

from __future__ import annotations

from typing import Any

import pytest

from quire.api.shared.answered_calls import MadeCalls
from quire.api.shared.content import function_call
from tests.api.conftest import HTTP, Serve

ASK = {"role": "user", "content": "Hi."}


def made(*calls: tuple[str, str]) -> MadeCalls:
    found = MadeCalls()
    found.add([function_call(call_id, name, {}) for call_id, name in calls])
    return found


def test_a_result_answers_the_call_of_its_id() -> None:
    calls = made(("a", "f"), ("b", "f"), ("c", "g"))
    assert calls.answered("b", "f") == ("b", "f")
    assert calls.answered("c", None) == ("c", "g")
    assert calls.answered("a", "said") == ("a", "said")


def test_a_result_without_an_id_answers_the_first_call_left() -> None:
    calls = made(("a", "f"), ("b", "g"), ("c", "f"), ("d", "h"))
    assert calls.answered(None, "f") == ("a", "f")
    assert calls.answered("", "f") == ("c", "f")
    assert calls.answered(None, None) == ("b", "g")
    assert calls.answered("d", None) == ("d", "h")
    assert calls.answered(None, None) == ("", None)


def test_earlier_calls_are_known_by_their_id() -> None:
    calls = made(("a", "f"), ("b", "g"))
    calls.add([function_call("c", "h", {})])
    assert calls.answered("a", None) == ("a", "f")
    assert calls.answered(None, None) == ("c", "h")
    assert calls.answered("unknown", None) == ("unknown", None)


@pytest.mark.parametrize("unnamed", [{}, {"id": None}, {"id": ""}])
def test_a_chat_without_ids_is_read_as_with_them(serve: Serve, unnamed: dict[str, Any]) -> None:
    """aichat sends null, and some servers give calls no id."""
    served = serve("Yes.")

    def prompt(ids: list[dict[str, Any]], content: dict[str, Any]) -> str:
        names = zip(ids, "fg", strict=True)
        calls = [{**id, "function": {"name": each, "arguments": "{}"}} for id, each in names]
        answers = [
            {"role": "tool", **content, **{f"tool_call_{key}": id[key] for key in id}} for id in ids
        ]
        messages = [ASK, {"role": "assistant", "tool_calls": calls}, *answers]
        body = {"model": "quire-demo", "messages": messages}
        answer = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return served.tokenizer.decode(served.engine.requests[-1].prompt)

    wanted = prompt([{"id": "a"}, {"id": "b"}], {"content": ""})
    for content in ({"content": ""}, {"content": None}, {}):
        assert prompt([unnamed, unnamed], content) == wanted
