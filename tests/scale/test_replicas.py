"""Two replicas on a real Ray answer as one server does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest

from tests.e2e.client import Client
from tests.support.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "quire-demo"
QUESTIONS = [f"What is {number} plus {2 * number + 1}?" for number in range(20, 36)]


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def chats(replicated: Child) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{replicated.url}/v1", api_key="none", max_retries=0)


def test_answers_are_those_of_one_server(replicated: Child, child: Child) -> None:
    def answers(url: str) -> list[object]:
        with Client(url) as client, ThreadPoolExecutor(8) as pool:
            bodies = list(pool.map(lambda each: client.complete(each, max_tokens=24), QUESTIONS))
        return [body["choices"] for body in bodies]

    assert answers(replicated.url) == answers(child.url)


def test_openai_chat_streams_what_it_answers(chats: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": asked("What is 27 plus 45?"), "temperature": 0}
    whole = chats.chat.completions.create(**fields).choices[0].message.content  # type: ignore[call-overload]
    chunks = chats.chat.completions.create(**fields, stream=True)  # type: ignore[call-overload]
    assert whole == "72"
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == whole


def test_responses_remember_and_embeddings_come(chats: openai.OpenAI) -> None:
    first = chats.responses.create(model=MODEL, input="What is 27 plus 45?", temperature=0)
    again = chats.responses.retrieve(first.id)
    assert first.output_text == again.output_text == "72"
    assert chats.embeddings.create(model=MODEL, input="text").data[0].embedding


def test_anthropic_messages_stream_what_they_answer(replicated: Child) -> None:
    client = anthropic.Anthropic(base_url=replicated.url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is 27 plus 45?"}]
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=messages)  # type: ignore[arg-type]
    with client.messages.stream(model=MODEL, max_tokens=16, messages=messages) as stream:  # type: ignore[arg-type]
        assert stream.get_final_text() == whole.content[0].text  # type: ignore[union-attr]


def test_choices_stops_and_grammars_work_through_replicas(replicated: Child) -> None:
    with Client(replicated.url) as client:
        several = client.complete("One two", n=3, temperature=1, seed=4, max_tokens=12)
        stopped = client.complete("1, 2, 3,", stop=["7"], max_tokens=64)
        bound = client.complete("Say", structured_outputs={"choice": ["yes", "no"]}, max_tokens=8)
    assert [each["index"] for each in several["choices"]] == [0, 1, 2]
    assert "7" not in stopped["choices"][0]["text"]
    assert bound["choices"][0]["text"] in ("yes", "no")
    replicated.wait_idle()


def test_refusals_are_those_of_one_server(replicated: Child, child: Child) -> None:
    bodies = [{"messages": 3}, {"messages": asked("x"), "temperature": -1}, {"model": "nope"}]
    for body in bodies:
        refused, same = (
            httpx.post(f"{url}/v1/chat/completions", json=body)
            for url in (replicated.url, child.url)
        )
        assert refused.status_code == same.status_code >= 400
        assert refused.json() == same.json()


def test_a_client_that_leaves_ends_its_request(replicated: Child) -> None:
    body = {"prompt": "Once", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{replicated.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    replicated.wait_idle()


def test_the_page_is_served(replicated: Child) -> None:
    page = httpx.get(replicated.url, headers={"accept": "text/html"})
    assert page.status_code == 200
    assert page.text.startswith("<!doctype html>")
