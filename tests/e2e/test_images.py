"""Pictures over HTTP: seen through every protocol, placed, cached, bounded, refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import socket
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
import pytest
from anthropic import AsyncAnthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from quire.demo.skills import SkillAnswer, SkillItem, judge, load
from tests.e2e import spoken
from tests.e2e.asking import SKILLS, ask, format_fields
from tests.e2e.client import CHAT, Client, at_once, one_by_one
from tests.support.child import Child, quire_serve
from tests.support.everyday import everyday
from tests.support.server import JSON_TYPE
from tests.support.waiting import wait_until

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PROTOCOLS = ("chat", "messages", "responses")
MARK = "<|image|>"
SOFT = 64  # soft tokens of a picture of 128 by 128 pixels; one more stands before, one behind them
COMMON = ("plain", "page-4", "turbo-4")
LOOK: Any = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
MAX_BYTES = 20_000


@cache
def items(skill: str) -> list[SkillItem]:
    return load(SKILLS / f"{skill}.jsonl")


@dataclass(frozen=True)
class Question:
    """A question about pictures, in the words of each protocol."""

    parts: tuple[dict[str, Any], ...]
    """Parts of a user's message, as chat completions have them."""
    expected: str = ""

    @property
    def urls(self) -> list[str]:
        return [part["image_url"]["url"] for part in self.parts if part["type"] == "image_url"]

    @property
    def text(self) -> str:
        return " ".join(part["text"] for part in self.parts if part["type"] == "text")

    @property
    def chat(self) -> list[Any]:
        """`messages` of chat completions."""
        return [{"role": "user", "content": list(self.parts)}]

    @property
    def blocks(self) -> list[Any]:
        """The parts as Anthropic's blocks."""
        return [
            text(part["text"]) if part["type"] == "text" else block(part["image_url"]["url"])
            for part in self.parts
        ]

    @property
    def messages(self) -> list[Any]:
        """`messages` of Anthropic's."""
        return [{"role": "user", "content": self.blocks}]

    @property
    def input(self) -> list[Any]:
        """`input` of responses."""
        content = [
            {"type": "input_text", "text": part["text"]}
            if part["type"] == "text"
            else {"type": "input_image", "image_url": part["image_url"]["url"]}
            for part in self.parts
        ]
        return [{"role": "user", "content": content}]

    def request(self, protocol: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Return route and body of a short greedy request."""
        body: dict[str, Any] = {"model": "quire-demo", "temperature": 0, **fields}
        match protocol:
            case "chat":
                return CHAT, {"messages": self.chat, "max_tokens": 16, **body}
            case "messages":
                return MESSAGES, {"messages": self.messages, "max_tokens": 16, **body}
            case _:
                return RESPONSES, {"input": self.input, "max_output_tokens": 16, **body}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def block(url: str) -> dict[str, Any]:
    """Return an image as Anthropic's clients send it."""
    head, _, data = url.partition(";base64,")
    if not data:
        return {"type": "image", "source": {"type": "url", "url": url}}
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    return {"type": "image", "source": source}


SHAPES = (
    "circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart", "rectangle",
)  # fmt: skip


def question(skill: str, index: int = 0) -> Question:
    item = items(f"picture_{skill}")[index]
    return Question(tuple(item.messages[0]["content"]), item.expected)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def png(image: PIL.Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def noise(side: int, seed: int = 0) -> bytes:
    """Return a picture that no coding makes small: three bytes a pixel."""
    pixels = random.Random(seed).randbytes(3 * side**2)
    return png(PIL.Image.frombytes("RGB", (side, side), pixels))


SMALL = png(PIL.Image.new("RGB", (128, 128), "red"))


def tokenize(client: Client, messages: list[Any], **fields: Any) -> list[int]:
    answer = client.post("/tokenize", messages=messages, **fields)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["tokens"]
    return ids


@pytest.fixture(scope="module")
def mark(child: Child) -> int:
    """Return the id of the token by which templates mark an image, and which its soft tokens
    have.
    """
    with Client(child.url) as client:
        body = {"prompt": MARK, "add_special_tokens": False}
        (found,) = client.post("/tokenize", **body).json()["tokens"]
    return int(found)


def runs(ids: list[int], mark: int) -> list[int]:
    """Return lengths of the runs of the mark, in order."""
    found, previous = [0], None
    for each in ids:
        if each == mark:
            found[-1] += 1
        elif previous == mark:
            found.append(0)
        previous = each
    return [length for length in found if length]


class TestProtocols:
    @pytest.mark.parametrize(
        "skill",
        everyday(["colour", "compare", "digits", "where"], lambda skill: skill == "colour"),
    )
    async def test_both_sdks_see_the_same(self, child: Child, client: Client, skill: str) -> None:
        asked = question(skill)
        openai = AsyncOpenAI(base_url=f"{child.url}/v1", api_key="none", max_retries=0)
        anthropic = AsyncAnthropic(base_url=child.url, api_key="none", max_retries=0)
        model: Any = {"model": "quire-demo"}
        limited = model | {"max_tokens": 16, "extra_body": {"temperature": 0}}
        bounded = model | {"max_output_tokens": 16, "temperature": 0}
        async with openai, anthropic:
            answers = await asyncio.gather(
                spoken.chat(openai, messages=asked.chat, **limited),
                spoken.chat_streamed(openai, messages=asked.chat, **limited),
                spoken.messages(anthropic, messages=asked.messages, **limited),
                spoken.messages_streamed(anthropic, messages=asked.messages, **limited),
                spoken.responses(openai, input=asked.input, **bounded),
                spoken.responses_streamed(openai, input=asked.input, **bounded),
            )
            counted = await anthropic.messages.count_tokens(
                model="quire-demo", messages=asked.messages
            )
        assert {(each.text, each.end) for each in answers} == {(asked.expected, "stop")}
        assert len({each.tokens for each in answers}) == 1
        prompt_tokens = len(tokenize(client, asked.chat))
        assert answers[0].tokens[0] == counted.input_tokens == prompt_tokens

    def test_soft_tokens_are_counted(self, client: Client, mark: int) -> None:
        words = text("What is it?")
        plain = tokenize(client, [{"role": "user", "content": [words]}])
        for count in (1, 2):
            shown = [image(data_url(SMALL))] * count
            ids = tokenize(client, [{"role": "user", "content": [*shown, words]}])
            assert len(ids) == len(plain) + count * (SOFT + 2)
            assert runs(ids, mark) == [SOFT] * count

    @pytest.mark.parametrize("detail", ["low", "high", "auto", None])
    def test_any_detail(self, client: Client, detail: str | None) -> None:
        asked = question("digits", 1)
        parts = tuple(
            image(part["image_url"]["url"], detail=detail) if part["type"] == "image_url" else part
            for part in asked.parts
        )
        answer = client.post(CHAT, messages=replace(asked, parts=parts).chat, temperature=0)
        assert answer.json()["choices"][0]["message"]["content"] == asked.expected

    def test_several_choices(self, client: Client) -> None:
        asked = question("colour", 1)
        route, body = asked.request("chat", n=2)
        answer = client.post(route, **body).json()
        said = [choice["message"]["content"] for choice in answer["choices"]]
        assert said == [asked.expected] * 2
        assert answer["usage"]["prompt_tokens"] == len(tokenize(client, asked.chat))

    def test_logprobs_in_company(self, client: Client) -> None:
        fields: Any = {"logprobs": True, "top_logprobs": 3}
        requests = [question("count", n).request("chat", **fields) for n in range(4)]
        calls = [partial(_logprobs, client, route, body) for route, body in requests]
        alone = [each() for each in calls]
        for salt in range(2):  # read anew, side by side
            salted = [
                partial(_logprobs, client, route, body | {"cache_salt": f"logprobs {salt}"})
                for route, body in requests
            ]
            for one, many in zip(alone, at_once(salted), strict=True):
                assert [each[0] for each in one] == [each[0] for each in many]
                for (_, expected), (_, found) in zip(one, many, strict=True):
                    assert found == pytest.approx(expected, abs=1e-3)

    def test_an_answer_that_was_started(self, client: Client) -> None:
        """The model goes on with what it is said to have said: digits of the number it sees."""
        for index in range(6):
            asked = question("digits", index)
            started = {"role": "assistant", "content": asked.expected[0]}
            route, body = asked.request("chat", continue_final_message=True)
            answer = client.post(route, **body | {"messages": [*asked.chat, started]}).json()
            whole = asked.expected[0] + answer["choices"][0]["message"]["content"]
            assert whole == asked.expected
            more = answer["usage"]["prompt_tokens"] - len(tokenize(client, asked.chat))
            assert more == 1
            route, body = asked.request("messages")
            said = client.post(route, **body | {"messages": [*asked.messages, started]}).json()
            assert asked.expected[0] + said["content"][0]["text"] == asked.expected

    def test_thinking(self, child: Child, client: Client) -> None:
        asked = question("colour")

        async def answers() -> list[spoken.Spoken]:
            openai = AsyncOpenAI(base_url=f"{child.url}/v1", api_key="none", max_retries=0)
            body: Any = {"model": "quire-demo", "messages": asked.chat, "temperature": 0}
            body |= {"max_tokens": 60, "extra_body": {"enable_thinking": True}}
            async with openai:
                return [
                    await spoken.chat(openai, **body),
                    await spoken.chat_streamed(openai, **body),
                ]

        whole, streamed = asyncio.run(answers())
        assert whole == streamed
        assert whole.reasoning
        thinking = {"type": "enabled", "budget_tokens": 1024}
        route, body = asked.request("messages", thinking=thinking, temperature=0, max_tokens=1200)
        said = client.post(route, **body).json()
        thoughts = [each["thinking"] for each in said["content"] if each["type"] == "thinking"]
        assert thoughts == [whole.reasoning]

    def test_a_bound_answer(self, client: Client) -> None:
        colours = sorted({item.expected for item in items("picture_colour")})
        schema = {
            "type": "object",
            "properties": {"colour": {"enum": colours}},
            "required": ["colour"],
            "additionalProperties": False,
        }
        bound = {"type": "json_schema", "json_schema": {"name": "seen", "schema": schema}}
        form = text("Answer with a JSON object: an object with the keys colour")
        right = 0
        for index in range(4):
            asked = question("colour", index)
            route, body = replace(asked, parts=(*asked.parts, form)).request(
                "chat", response_format=bound
            )
            choice = client.post(route, **body).json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            right += json.loads(choice["message"]["content"]) == {"colour": asked.expected}
        assert right >= 3


def _logprobs(client: Client, route: str, body: dict[str, Any]) -> list[tuple[str, float]]:
    choice = client.post(route, **body).json()["choices"][0]
    return [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]]


RESULTS: dict[str, tuple[list[str], bool]] = {
    "alone": (["image"], False),
    "beside text": (["text", "image", "text"], False),
    "failed": (["image"], True),
    "failed, beside text": (["text", "image"], True),
}


def result(url: str, kind: str) -> dict[str, Any]:
    """Return a tool's result that shows a picture."""
    order, failed = RESULTS[kind]
    content = [block(url) if each == "image" else text("Here it is.") for each in order]
    shown = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    return shown | ({"is_error": True} if failed else {})


def looked(url: str, kind: str, *after: dict[str, Any]) -> dict[str, Any]:
    """Return a request whose last message brings a tool's result."""
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result(url, kind), *after]},
    ]
    return {"model": "quire-demo", "messages": messages, "tools": [LOOK]}


class TestToolResults:
    @pytest.mark.parametrize(
        ("skill", "kind"),
        everyday(
            product(["shape", "count"], RESULTS),
            lambda skill, kind: (skill, kind) in {("shape", "alone"), ("count", "failed")},
        ),
    )
    def test_are_seen(self, client: Client, skill: str, kind: str) -> None:
        for index in range(3):
            asked = question(skill, index)
            body = looked(asked.urls[0], kind, text(asked.text))
            answer = client.post(MESSAGES, **body, max_tokens=16, temperature=0).json()
            assert [each["text"] for each in answer["content"]] == [asked.expected]
            usage = answer["usage"]
            counted = client.post(f"{MESSAGES}/count_tokens", **body).json()
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert prompt == counted["input_tokens"]

    @pytest.mark.parametrize("kind", everyday(RESULTS, lambda kind: kind == "alone"))
    def test_may_be_the_last_word(self, client: Client, kind: str) -> None:
        said = []
        for index in range(3):
            body = looked(question("colour", index).urls[0], kind)
            answer = client.post(MESSAGES, **body, max_tokens=16, temperature=0)
            assert answer.status_code == 200, answer.text
            said.append(json.dumps(answer.json()["content"]))
        assert len(set(said)) == 3, "the answer is the same whatever the picture"

    def test_take_as_many_tokens_as_pictures_of_users(self, client: Client) -> None:
        counts = []
        for content in ([text("Here it is.")], [text("Here it is."), block(data_url(SMALL))]):
            body = looked("", "alone")
            body["messages"][-1]["content"][0]["content"] = content
            answer = client.post(f"{MESSAGES}/count_tokens", **body)
            counts.append(answer.json()["input_tokens"])
        assert counts[1] - counts[0] == SOFT + 2


class TestCache:
    def test_a_picture_is_read_once_in_a_conversation(self, client: Client) -> None:
        asked = question("shape", 3)
        first = [{"role": "user", "content": [*asked.blocks, text("Look well.")]}]
        reply = {"role": "assistant", "content": "yes"}
        second = [*first, reply, {"role": "user", "content": "And what colour is it?"}]
        cold = _cached(client, first, "turns")
        assert cold == 0
        started = client.post(f"{MESSAGES}/count_tokens", model="quire-demo", messages=first)
        warm = _cached(client, second, "turns")
        assert warm >= started.json()["input_tokens"] - 1 > SOFT

    def test_another_picture_at_its_place_shares_nothing_of_it(
        self, client: Client, mark: int
    ) -> None:
        one, other = question("shape", 3), question("shape", 5)
        text_before = text("Look at this picture and say what it shows, if you please.")
        place = tokenize(client, [{"role": "user", "content": [text_before, *one.parts]}])
        before = place.index(mark)
        for asked in (one, other):
            messages = [{"role": "user", "content": [text_before, *asked.blocks]}]
            cached = _cached(client, messages, "another")
            assert cached == 0 if asked is one else 0 < cached <= before
        again = [{"role": "user", "content": [text_before, *one.blocks]}]
        assert _cached(client, again, "another") > before + SOFT

    @pytest.mark.parametrize("picture_first", [True, False])
    def test_marks_that_were_written_share_nothing_with_a_picture(
        self, client: Client, mark: int, picture_first: bool
    ) -> None:
        asked = question("colour", 2)
        ids = tokenize(client, asked.chat)
        salt = {"cache_salt": f"written {picture_first}", "max_tokens": 1}

        def picture() -> Any:
            return client.post(CHAT, messages=asked.chat, **salt).json()["usage"]

        def written() -> Any:
            return client.complete(ids, **salt)["usage"]

        calls = (picture, written) if picture_first else (written, picture)
        _, usage = [each() for each in calls]
        assert usage["prompt_tokens"] == len(ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= ids.index(mark)

    def test_responses_keep_the_first_turns_picture(self, client: Client) -> None:
        named = [(shape, item) for item in range(20) for shape in SHAPES
                 if f"the {shape}?" in question("colour", item).text]  # fmt: skip
        for word, index in named[:3]:
            asked = question("colour", index)
            route, body = asked.request("responses", cache_salt="kept")
            first = client.post(route, **body).json()
            assert first["output"][0]["content"][0]["text"] == asked.expected
            follow = {"input": f"What shape is {asked.expected}?", "cache_salt": "kept"}
            common: Any = {"model": "quire-demo", "temperature": 0, "max_output_tokens": 16}
            second = client.post(
                RESPONSES, previous_response_id=first["id"], **follow, **common
            ).json()
            assert second["output"][0]["content"][0]["text"] == word
            cached = second["usage"]["input_tokens_details"]["cached_tokens"]
            assert cached >= first["usage"]["input_tokens"] - 1
            said = {"role": "assistant", "content": asked.expected}
            whole = [*asked.input, said, {"role": "user", "content": follow["input"]}]
            sent = client.post(RESPONSES, input=whole, **common).json()
            assert sent["usage"]["input_tokens"] == second["usage"]["input_tokens"]


def _cached(client: Client, messages: list[Any], salt: str) -> int:
    body: Any = {"model": "quire-demo", "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    answer = client.post(MESSAGES, messages=messages, **body)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["cache_read_input_tokens"]
    return cached


MIXED = [
    *((f"picture_{skill}", 4) for skill in ("colour", "compare", "count", "digits")),
    *((skill, 1) for skill in ("arithmetic", "facts", "tool_call", "tool_answer")),
]


def check_company(client: Client, name: str, fields: dict[str, Any]) -> None:
    """Eight at once, every picture and word read anew, say what each says alone."""
    mixed = [items(skill)[index] for skill, index in MIXED]

    def answers(salt: str) -> list[Any]:
        salted = fields | {"cache_salt": f"{name} {salt}", "max_tokens": 80}
        return [partial(ask, client, item, **salted) for item in mixed]

    alone: list[SkillAnswer] = [each() for each in answers("alone")]
    together = at_once(answers("together"))
    assert together == alone
    right = sum(judge(item, answer) for item, answer in zip(mixed, together, strict=True))
    assert right >= (7 if name in COMMON else 0)


def formats(client: Client) -> dict[str, dict[str, Any]]:
    return format_fields(client.http.get("/v1/models").json()["data"][0]["kv_formats"])


class TestCompany:
    @pytest.mark.parametrize("name", everyday(COMMON, lambda name: name == "page-4"))
    def test_eight_at_once(self, client: Client, name: str) -> None:
        check_company(client, name, formats(client)[name])

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_eight_at_once_under_every_format(self, client: Client) -> None:
        for name, fields in formats(client).items():
            try:
                check_company(client, name, fields)
            except AssertionError as error:
                raise AssertionError(f"under {name}") from error

    async def test_a_client_that_goes_away_while_its_pictures_are_read(self, child: Child) -> None:
        shown = [image(data_url(noise(96, seed))) for seed in range(60)]
        asking = {"messages": [{"role": "user", "content": shown}], "stream": True}
        body = asking | {"max_tokens": 20_000, "ignore_eos": True}  # nor does it end unseen
        aborted, steps = 'quire_sequences_finished_total{reason="abort"}', "quire_steps_total"
        before = child.samples()
        async with httpx.AsyncClient(base_url=child.url, timeout=60) as http:
            asked = asyncio.create_task(http.post(CHAT, json=body))
            await asyncio.to_thread(
                wait_until, lambda: asked.done() or child.samples()[steps] > before[steps]
            )
            assert not asked.done(), asked.result().text
            asked.cancel()
        await asyncio.to_thread(child.wait_idle)
        assert child.samples()[aborted] == before.get(aborted, 0) + 1


def function(**fields: Any) -> list[Any]:
    declared = {"name": "look", "parameters": {"type": "object", "properties": {}}, **fields}
    return [{"type": "function", "function": declared}]


def called(arguments: dict[str, Any], answer: str = "ok", **said: Any) -> list[Any]:
    """Return a call and its result, before the question."""
    call = {"name": "look", "arguments": json.dumps(arguments)}
    return [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            **said,
        },
        {"role": "tool", "tool_call_id": "c1", "content": answer},
    ]


@dataclass(frozen=True)
class Written:
    """A message in which a client writes the mark as words."""

    before: list[Any] = field(default_factory=list)
    head: list[Any] = field(default_factory=list)
    tail: list[Any] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)


_PROPERTY = {"type": "string", "description": MARK, "enum": [MARK]}
WRITTEN = {
    "before the image": Written(head=[text(f"See {MARK} here.")]),
    "behind the image": Written(tail=[text(f"See {MARK} here.")]),
    "on both sides": Written(head=[text(MARK)], tail=[text(MARK + MARK)]),
    "system prompt": Written(before=[{"role": "system", "content": f"You see {MARK}."}]),
    "earlier turn": Written(
        before=[{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
    ),
    "tool's description": Written(tools=function(description=MARK)),
    "tool's parameter": Written(
        tools=function(parameters={"type": "object", "properties": {"at": _PROPERTY}})
    ),
    "parameter's name": Written(
        tools=function(parameters={"type": "object", "properties": {MARK: {"type": "string"}}})
    ),
    "call's argument": Written(before=called({"at": MARK, "all": [{"x": MARK}]})),
    "argument's name": Written(before=called({MARK: 1})),
    "call's result": Written(before=called({}, MARK)),
    "thought": Written(before=called({}, reasoning_content=MARK)),
}


class TestWrittenMarks:
    """`<|image|>` in what clients write is words, and moves no image from its place."""

    @pytest.mark.parametrize("place", WRITTEN)
    def test_beside_an_image(self, client: Client, mark: int, place: str) -> None:
        written = WRITTEN[place]
        shown = {"role": "user", "content": [*written.head, image(data_url(SMALL)), *written.tail]}
        fields: Any = {"tools": written.tools} if written.tools else {}
        ids = tokenize(client, [*written.before, shown], **fields)
        assert runs(ids, mark) == [SOFT]

    @pytest.mark.parametrize(
        "place", everyday(WRITTEN, lambda place: place in ("on both sides", "call's result"))
    )
    def test_the_image_is_seen(self, client: Client, place: str) -> None:
        written, asked = WRITTEN[place], question("digits", 2)
        message = {"role": "user", "content": [*written.head, *asked.parts, *written.tail]}
        fields: Any = {"tools": written.tools} if written.tools else {}
        answer = client.post(
            CHAT, messages=[*written.before, message], max_tokens=16, temperature=0, **fields
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == asked.expected

    @pytest.mark.parametrize(
        "place", everyday(WRITTEN, lambda place: place in ("on both sides", "tool's parameter"))
    )
    def test_without_an_image(self, client: Client, mark: int, place: str) -> None:
        written = WRITTEN[place]
        message = {"role": "user", "content": [*written.head, text("Hello."), *written.tail]}
        fields: Any = {"tools": written.tools} if written.tools else {}
        messages = [*written.before, message]
        ids = tokenize(client, messages, **fields)
        assert runs(ids, mark) == []
        answer = client.post(CHAT, messages=messages, max_tokens=4, temperature=0, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)


class Host(ThreadingHTTPServer):
    """Listens to all of this machine's addresses, and writes down who asks for what."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self) -> None:
        self.seen: list[str] = []
        wildcard = "::" if self.address_family == socket.AF_INET6 else "0.0.0.0"
        super().__init__((wildcard, 0), Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("location", f"http://127.0.0.1:{self.server.port}/picture")
        self.send_header("content-length", str(len(SMALL)))
        self.end_headers()
        self.wfile.write(SMALL)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    server = Host()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that images may be read from, beside one that they may not."""
    root = tmp_path_factory.mktemp("media")
    for name in ("inside", "outside", "inside-too"):
        (root / name).mkdir()
        (root / name / "red.png").write_bytes(SMALL)
    (root / "inside" / "link.png").symlink_to(root / "outside" / "red.png")
    (root / "inside" / "way").symlink_to(root / "outside")
    return root / "inside"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Child]:
    """Yield a server with narrow limits, which may fetch from the network and from a folder."""
    limits = ("--max-images", "2", "--max-image-bytes", str(MAX_BYTES), "--allow-media-hosts")
    log = tmp_path_factory.mktemp("guarded")
    with quire_serve(log, *limits, "--media-folder", str(folder)) as child:
        yield child
        assert child.process.poll() is None, f"the server died: {child.log.read_text()}"


@pytest.fixture
def narrow(guarded: Child) -> Iterator[Client]:
    with Client(guarded.url) as client:
        yield client


@cache
def bomb() -> bytes:
    """Return a valid PNG of a few kilobytes and 144 million pixels."""
    side = 12_000
    head = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])  # one bit of grey a pixel
    rows = zlib.compress(bytes((1 + side // 8) * side), 9)
    chunks = ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    )


BAD_DATA: dict[str, tuple[str, str]] = {
    "too many bytes": (data_url(noise(128)), "media_too_large"),
    "too many pixels": (data_url(bomb()), "media_too_large"),
    "cut short": (data_url(SMALL[: len(SMALL) // 2]), "media_invalid"),
    "damaged": (data_url(SMALL.replace(b"IDAT", b"XDAT")), "media_invalid"),
    "no image": (data_url(b"%PDF-1.7 no picture at all"), "media_invalid"),
    "no data": ("data:image/png,", "media_invalid"),
    "not base64": ("data:image/png;base64,@@@@", "media_invalid"),
    "base64 that ends early": ("data:image/png;base64,iVBORw0KG", "media_invalid"),
    "no comma": ("data:image/png", "media_invalid"),
    "no URL": ("picture.png", "media_invalid"),
    "another scheme": ("ftp://example.com/picture.png", "media_invalid"),
}


@dataclass(frozen=True)
class Refused:
    """An error, free of any protocol; Anthropic's have no `param` of their own."""

    status: int
    code: str
    param: str | None
    message: str


def refused(client: Client, protocol: str, *urls: str) -> Refused:
    """Return what comes back for a question with these images behind its words."""
    route, body = Question((text("What?"), *(image(url) for url in urls))).request(protocol)
    answer = client.post(route, **body)
    error = answer.json().get("error") or {}
    code = error.get("code") or error.get("details", {}).get("error_code", "")
    return Refused(answer.status_code, code, error.get("param"), error.get("message", ""))


def param_of(protocol: str, index: int) -> str:
    """Return what errors call the image of that place in a message."""
    return {
        "chat": f"messages[0].content[{index}].image_url.url",
        "messages": f"messages[0].content[{index}].source",
        "responses": f"input[0].content[{index}].image_url",
    }[protocol]


def check_refused(client: Client, protocol: str, url: str, code: str) -> None:
    found, param = refused(client, protocol, data_url(SMALL), url), param_of(protocol, 2)
    assert (found.status, found.code) == (400, code), found
    assert found.message.startswith(f"'{param}' cannot be used: ")
    assert found.param == (None if protocol == "messages" else param)


class TestRefusals:
    @pytest.mark.parametrize(
        ("kind", "protocol"),
        everyday(
            product(BAD_DATA, PROTOCOLS),
            lambda kind, protocol: protocol == "chat" or kind == "damaged",
        ),
    )
    def test_data(self, narrow: Client, kind: str, protocol: str) -> None:
        check_refused(narrow, protocol, *BAD_DATA[kind])

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_too_many(self, narrow: Client, protocol: str) -> None:
        url = data_url(SMALL)
        assert refused(narrow, protocol, url, url).status == 200
        found = refused(narrow, protocol, url, url, url)
        assert (found.status, found.code) == (400, "too_many_images")
        assert "3 images; at most 2 are allowed (--max-images)" in found.message
        assert found.param == (None if protocol == "messages" else param_of(protocol, 3))

    def test_a_long_history_loses_its_oldest(self, narrow: Client) -> None:
        turn = {"role": "user", "content": [image(data_url(SMALL))]}
        reply = {"role": "assistant", "content": "red"}
        answer = narrow.post(CHAT, messages=[turn, reply, turn, reply, turn])
        assert answer.status_code == 200, answer.text
        ignored = answer.headers["x-quire-ignored-fields"]
        assert ignored == "messages[0].content[0].image_url.url"

    def test_counting_refuses_alike(self, narrow: Client) -> None:
        url, code = BAD_DATA["damaged"]
        body: Any = {"model": "quire-demo", "messages": Question((image(url),)).messages}
        answer = narrow.post(f"{MESSAGES}/count_tokens", **body)
        assert (answer.status_code, answer.json()["error"]["details"]["error_code"]) == (400, code)
        answer = narrow.post("/tokenize", messages=Question((image(url),)).chat)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)

    @pytest.mark.parametrize("detail", ["finest", "", 3])
    def test_details_that_nobody_knows(self, narrow: Client, detail: Any) -> None:
        shown = [{"role": "user", "content": [image(data_url(SMALL), detail=detail)]}]
        answer = narrow.post(CHAT, messages=shown)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.detail"

    def test_streams_beside_them_go_on(self, guarded: Child, narrow: Client) -> None:
        prompts = ("The red cat saw a small boat", "Once upon a time there was a king")
        long: Any = {"max_tokens": 60, "ignore_eos": True}
        alone = [narrow.text(prompt, **long) for prompt in prompts]
        bad = [(protocol, url) for protocol in PROTOCOLS for url, _ in BAD_DATA.values()]
        faults: list[int] = []

        def fault(protocol: str, url: str) -> int:
            return refused(narrow, protocol, url).status

        disturb = one_by_one((partial(fault, *each) for each in bad), faults)
        calls = [partial(narrow.stream, prompts[0], disturb, **long)]
        calls += [partial(narrow.stream, prompt, **long) for prompt in prompts[1:]]
        streams = at_once(calls)
        assert faults == [400] * len(bad)
        assert [each.text for each in streams] == alone
        asked = question("colour", 5)
        route, body = asked.request("chat")
        answer = narrow.post(route, **body).json()
        assert answer["choices"][0]["message"]["content"] == asked.expected
        guarded.wait_idle()


ELSEWHERE = (
    "../outside/red.png",
    "%2e%2e/outside/red.png",
    "..%2Foutside/red.png",
    "link.png",
    "way/red.png",
    "../inside-too/red.png",
    "../outside/none.png",
    "/etc/passwd",
)


class TestFiles:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_below_the_folder_are_read(self, narrow: Client, folder: Path, protocol: str) -> None:
        assert refused(narrow, protocol, (folder / "red.png").as_uri()).status == 200
        ids = [
            tokenize(narrow, Question((image(url),)).chat)
            for url in ((folder / "red.png").as_uri(), data_url(SMALL))
        ]
        assert ids[0] == ids[1]

    @pytest.mark.parametrize(
        ("path", "protocol"),
        everyday(
            product(ELSEWHERE, PROTOCOLS),
            lambda path, protocol: protocol == "chat" or path == "link.png",
        ),
    )
    def test_elsewhere_are_not(
        self, narrow: Client, folder: Path, path: str, protocol: str
    ) -> None:
        url = f"file://{path}" if path.startswith("/") else f"file://{folder}/{path}"
        check_refused(narrow, protocol, url, "media_not_allowed")

    @pytest.mark.parametrize(
        ("path", "code"),
        [
            ("none.png", "media_unavailable"),
            ("", "media_unavailable"),
            ("red%00.png", "media_invalid"),
            ("a" * 5000, "media_unavailable"),
        ],
    )
    def test_that_cannot_be_read(self, narrow: Client, folder: Path, path: str, code: str) -> None:
        check_refused(narrow, "chat", f"file://{folder}/{path}", code)

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_without_a_folder_none_is_read(
        self, client: Client, folder: Path, protocol: str
    ) -> None:
        check_refused(client, protocol, (folder / "red.png").as_uri(), "media_not_allowed")


LOOPBACK = (
    "127.0.0.1",
    "127.1",
    "localhost",
    "LOCALHOST",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "0.0.0.0",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
)


class TestHosts:
    @pytest.mark.parametrize(
        ("path", "address"),
        everyday(
            product(["/picture", "/moved"], LOOPBACK),
            lambda path, address: (
                (path, address)
                in {("/picture", "localhost"), ("/moved", "127.0.0.1"), ("/picture", "0177.0.0.1")}
            ),
        ),
    )
    def test_of_this_machine_are_never_asked(
        self, narrow: Client, host: Host, address: str, path: str
    ) -> None:
        assert narrow.http.get(f"http://127.0.0.1:{host.port}/picture").status_code == 200
        host.seen.clear()
        for protocol in PROTOCOLS:
            url = f"http://{address}:{host.port}{path}"
            check_refused(narrow, protocol, url, "media_not_allowed")
        assert host.seen == []

    @pytest.mark.parametrize(
        ("url", "code"),
        [
            ("http://169.254.169.254/latest/meta-data", "media_not_allowed"),
            ("http://10.0.0.1/", "media_not_allowed"),
            ("http://192.168.1.1/", "media_not_allowed"),
            ("http://[fd00::1]/", "media_not_allowed"),
            ("http://user:word@127.0.0.1/", "media_invalid"),
            ("http://[::1/", "media_invalid"),
            ("http://127.0.0.1:99999/", "media_invalid"),
            ("http://nowhere.invalid/", "media_unavailable"),
        ],
    )
    def test_that_cannot_be_asked(self, narrow: Client, url: str, code: str) -> None:
        check_refused(narrow, "chat", url, code)

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_none_is_asked_unless_allowed(self, client: Client, host: Host, protocol: str) -> None:
        host.seen.clear()
        url = f"http://127.0.0.1:{host.port}/picture"
        check_refused(client, protocol, url, "media_not_allowed")
        check_refused(client, protocol, "https://example.com/cat.png", "media_not_allowed")
        assert host.seen == []


class TestSize:
    @pytest.mark.parametrize("side", everyday([230, 300, 460], lambda side: side == 300))
    def test_large_requests_are_taken(self, client: Client, side: int) -> None:
        """The end of a body that comes in one piece is no head of the next request."""
        route, body = Question((image(data_url(noise(side))),)).request("chat", max_tokens=1)
        statuses = [client.post(route, **body).status_code for _ in range(8)]
        assert statuses == [200] * 8


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=5,
)
TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "text/plain", "", "x;y=z")
HEADS = ("data:", "http://", "https://", "file://", "file:", "http://127.0.0.1:1/", "", "DATA:;")


@st.composite
def damaged_pictures(draw: st.DrawFn) -> str:
    """Return a `data:` URL of a picture in which some bytes are others, or are gone."""
    kind = draw(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP"]))
    out = io.BytesIO()
    PIL.Image.new("RGB", (40, 30), "red").save(out, kind)
    data = bytearray(out.getvalue())
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=6)
    ):
        data[at] = value
    end = draw(st.none() | st.integers(0, len(data)))
    encoded = base64.b64encode(bytes(data[:end])).decode()
    return f"data:{draw(st.sampled_from(TYPES))};base64,{encoded}"


URLS = (
    damaged_pictures()
    | st.builds(str.__add__, st.sampled_from(HEADS), st.text(max_size=20))
    | st.builds(
        lambda kind, coding, rest: f"data:{kind}{coding},{rest}",
        st.sampled_from(TYPES),
        st.sampled_from(["", ";base64", ";BASE64", ";base64;base64"]),
        st.text(alphabet="%A=/+é\n 0", max_size=24),
    )
)


@st.composite
def mutated(draw: st.DrawFn, part: dict[str, Any]) -> Any:
    """Return an image part with another URL, and with some fields lost, replaced or added."""

    def changed(value: dict[str, Any]) -> dict[str, Any]:
        fields = {
            key: changed(inner) if isinstance(inner, dict) else inner
            for key, inner in value.items()
        }
        match draw(st.sampled_from(["keep"] * 4 + ["lose", "replace", "add"])):
            case "lose":
                fields.pop(draw(st.sampled_from(sorted(fields))))
            case "replace":
                fields[draw(st.sampled_from(sorted(fields)))] = draw(JUNK)
            case "add":
                names = st.sampled_from(["detail", "file_id", "url", "data", "cache_control", "x"])
                fields[draw(names)] = draw(JUNK)
        return fields

    url = draw(URLS)
    named = json.loads(json.dumps(part).replace('"URL"', json.dumps(url)))
    return changed(named)


def parts_of(url: str) -> dict[str, dict[str, Any]]:
    return {
        "chat": image(url),
        "messages url": {"type": "image", "source": {"type": "url", "url": url}},
        "messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": url},
        },
        "responses": {"type": "input_image", "image_url": url},
    }


class TestMutations:
    @pytest.mark.parametrize("kind", parts_of(""))
    def test_no_image_part_breaks_the_server(self, narrow: Client, kind: str) -> None:
        codes: set[int] = set()

        @settings(
            max_examples=12,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )
        @given(part=mutated(parts_of("URL")[kind]))
        def check(part: Any) -> None:
            route, body = Question(()).request(kind.split()[0])
            turn = {"role": "user", "content": [part]}
            body |= {"input": [turn]} if route == RESPONSES else {"messages": [turn]}
            body.pop("max_output_tokens", None)
            answer = narrow.http.post(
                route,
                content=json.dumps(body),  # escapes what UTF-8 cannot hold
                headers=JSON_TYPE,
            )
            codes.add(answer.status_code)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
            assert answer.status_code == 200 or answer.json()["error"]["message"]

        check()
        assert 400 in codes
        asked = question("shape", 1)
        route, body = asked.request("chat")
        answer = narrow.post(route, **body).json()
        assert answer["choices"][0]["message"]["content"] == asked.expected


def test_nothing_is_held_in_the_end(child: Child, guarded: Child) -> None:
    for each in (child, guarded):
        each.wait_idle()
        assert "Traceback" not in each.log.read_text()
