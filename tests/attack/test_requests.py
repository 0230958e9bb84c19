"""Requests that are made to cost time or memory: their neighbour notices nothing."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import psutil
import pytest

from quire.api.shared.signing import Signer
from tests.attack.harness import MIB, Victim
from tests.support.child import quire_serve
from tests.support.everyday import everyday
from tests.support.server import JSON_TYPE, answered, leaving
from tests.support.waiting import HANG_S, wait_until

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(number: int) -> dict[str, Any]:
    return {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "look", "arguments": "{}"},
    }


def calls() -> dict[str, Any]:
    """Return tool calls and answers beside each other."""
    answers = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(500)]
    asked = {"role": "assistant", "tool_calls": [call(n) for n in range(2000)]}
    return {"messages": [user("word " * 140_000), asked, *answers], "max_tokens": 1}  # too long


def described() -> dict[str, Any]:
    tool = {"name": "look", "description": "word " * (2 * MIB // 5)}
    tools = [{"type": "function", "function": tool}]
    return {"messages": [user("x")], "tools": tools, "max_tokens": 1}


def unoffered() -> dict[str, Any]:
    """Return tools that no prompt holds, because `tool_choice` is "none"."""
    schema = {"type": "object", "properties": {f"p{n}": {"enum": ["a"]} for n in range(100_000)}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    return {"messages": [user("x")], "tools": [tool], "tool_choice": "none", "max_tokens": 1}


def bombs() -> dict[str, Any]:
    """Return reasoning that another server packed, which would unpack to a thousand times its
    size.
    """
    data = Signer("stranger").pack("a" * (8 * MIB))
    said = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": data}] * 60}
    return {"model": "quire-demo", "messages": [user("x"), said, user("y")], "max_tokens": 1}


REQUESTS: dict[str, tuple[str, Any]] = {
    "blocks": (
        COUNT,
        lambda: {
            "model": "quire-demo",
            "messages": [user([{"type": "text", "text": "a"}] * 20_000)],
        },
    ),
    "errors": (CHAT, lambda: {"messages": [1] * 1_000_000}),
    "calls": (CHAT, calls),
    "description": (CHAT, described),
    "stops": (CHAT, lambda: {"messages": [user("x")], "stop": "x" * 40_000, "n": 128}),
    "thoughts": (MESSAGES, bombs),
    "unoffered": (CHAT, unoffered),
    "parts": (
        CHAT,
        lambda: {
            "messages": [
                user([{"type": "image_url", "image_url": {"url": "file:///" + "a/" * 200_000}}])
            ]
        },
    ),
    "escapes": (
        CHAT,
        lambda: {
            "messages": [
                user([{"type": "image_url", "image_url": {"url": "data:," + "%" * 8 * MIB}}])
            ]
        },
    ),
}


DAILY = ("calls", "errors", "stops", "thoughts", "escapes")
"""One of each kind every day: a long prompt, a wrong body, a search, packed data, a file."""


@pytest.mark.parametrize("name", everyday(REQUESTS, lambda name: name in DAILY))
def test_a_neighbour_notices_nothing(victim: Victim, name: str) -> None:
    route, make = REQUESTS[name]
    body = json.dumps(make()).encode()
    with victim.watched() as seen:
        answer = httpx.post(victim.url + route, content=body, headers=JSON_TYPE, timeout=200)
    assert answer.status_code in (200, 400), answer.text
    # Of one process at most: what a job may take, and copies of the body on its way.
    seen.check(peak=1200 * MIB)


def test_those_whose_clients_leave_are_killed(victim: Victim) -> None:
    body = calls()
    with victim.watched() as seen:
        for _ in range(7):
            with leaving(victim.url, CHAT, body) as raw:
                wait_until(lambda: victim.reads() or answered(raw))
            wait_until(lambda: not victim.jobs())
    seen.check(peak=1200 * MIB)


LONG = [user("word " * (8 * MIB // 5))]
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": LONG}),
    "count": (COUNT, {"model": "quire-demo", "messages": LONG}),
    "tokenize": ("/tokenize", {"prompt": LONG[0]["content"]}),
    "forged": ("/tokenize", {"messages": [user("<turn|>" * (8 * MIB // 7))]}),
}


@pytest.mark.parametrize("name", everyday(TOO_LONG, lambda name: name in ("chat", "tokenize")))
def test_a_text_far_too_long_is_not_encoded_whole(victim: Victim, name: str) -> None:
    route, body = TOO_LONG[name]
    with victim.watched() as seen:
        answer = httpx.post(victim.url + route, json=body, timeout=200)
    assert answer.status_code == 400
    error = answer.json()["error"]
    code = error["code"] if "code" in error else error["details"]["error_code"]
    assert code == "context_length_exceeded"
    seen.check(peak=300 * MIB)  # copies of the body; encoded whole it takes 730 MiB more


@pytest.mark.parametrize("count", everyday([8_000, 20_000, 60_000], lambda count: count == 8_000))
def test_what_is_kept_of_long_conversations_holds_up_nobody(victim: Victim, count: int) -> None:
    route, parts = f"{victim.url}/v1/responses", [{"type": "input_text", "text": ""}] * count
    said = [{"role": "user", "content": parts}, {"role": "user", "content": "x"}]
    with victim.watched() as seen:
        body: dict[str, Any] = {"input": said, "max_output_tokens": 16}
        first = httpx.post(route, json=body, timeout=200).json()
        body = {"input": "y", "previous_response_id": first["id"], "max_output_tokens": 16}
        assert httpx.post(route, json=body, timeout=200).status_code == 200
        again = {"type": "item_reference", "id": first["output"][0]["id"]}
        body = {"input": [again] * 200, "max_output_tokens": 16}
        assert httpx.post(route, json=body, timeout=200).status_code == 200
    seen.check()


@pytest.mark.parametrize(
    ("choices", "peak"), [(32, 280 * MIB), pytest.param(128, 600 * MIB, marks=pytest.mark.slow)]
)
def test_many_pictures_for_many_choices_are_read_once(
    victim: Victim, choices: int, peak: int
) -> None:
    part = {"type": "image_url", "image_url": {"url": dot()}}
    body = {"messages": [user([part] * 64)], "n": choices, "max_tokens": 1}
    with victim.watched() as seen:
        answer = httpx.post(victim.url + CHAT, json=body, timeout=200)
        assert answer.status_code == 200, answer.text
    # Read once they take 150 to 210 MB, most of it buffers of prompts' segments. Read for each
    # choice they take 5.5 MB more of each; the answers' blocks are kept for reuse.
    seen.check(peak=peak, left=400 * MIB)


@pytest.mark.slow
def test_a_server_whose_jobs_are_busy_ends_when_told(tmp_path: Path) -> None:
    """SIGTERM beside requests for files whose clients have left."""
    body = REQUESTS["parts"][1]()
    with quire_serve(tmp_path) as child:
        for _ in range(7):
            with leaving(child.url, CHAT, body) as raw, contextlib.suppress(TimeoutError):
                raw.settimeout(0.2)
                raw.recv(1)
        processes = psutil.Process(child.process.pid).children(recursive=True)
        child.process.terminate()
        assert child.process.wait(HANG_S) == 0
        assert not psutil.wait_procs(processes, timeout=HANG_S)[1], "a process is left"


def dot() -> str:
    """Return a small picture."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (32, 32), "red").save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def picture(width: int, height: int) -> str:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = PIL.Image.fromarray(pixels).resize((4000, 4000))
    image.save(file, "jpeg", progressive=True, quality=20)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def test_decoding_ends_with_its_client(victim: Victim) -> None:
    part = {"type": "image_url", "image_url": {"url": picture(64, 64)}}
    with victim.watched() as seen:
        for _ in range(3):
            with leaving(victim.url, CHAT, {"messages": [user([part] * 6)]}) as raw:
                wait_until(lambda: victim.reads() or answered(raw))
            wait_until(lambda: not victim.jobs())
        # Nothing is left to wait for.
        answer = httpx.post(
            victim.url + CHAT, json={"messages": [user("Hello")], "max_tokens": 1}, timeout=60
        )
        assert answer.status_code == 200
    seen.check(peak=2400 * MIB)
