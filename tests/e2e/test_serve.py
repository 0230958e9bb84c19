"""`quire serve` with the embedded model: requests beside each other, faults, and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.client import CHAT, COMPLETIONS, Client, Streamed, at_once, one_by_one
from tests.support.child import Child, quire_serve
from tests.support.server import JSON_TYPE, leaving
from tests.support.waiting import HANG_S, wait_until

STORY = "The red cat saw a small boat near the green hill. Two birds"
OTHERS = (
    "Count to ten: one, two,",
    "The capital of France is",
    "Once upon a time there was a king who had",
    "My name is",
)
LONG: Any = {"max_tokens": 40, "ignore_eos": True}
STOPPED, ABORTED = (f'quire_sequences_finished_total{{reason="{r}"}}' for r in ("stop", "abort"))


@pytest.mark.slow
def test_ready_in_three_seconds(tmp_path: Path) -> None:
    times = []
    for _ in range(5):  # other work on the machine can only make a start longer
        with quire_serve(tmp_path) as child:
            times.append(child.ready_s)
        if times[-1] < 3:
            break
    if min(times) >= 3 and os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("the machine is busy with something else")
    assert min(times) < 3


def test_when_the_engine_dies_everyone_is_told(tmp_path: Path) -> None:
    module = "tests.e2e.serve_lingering"
    serving = quire_serve(tmp_path, "--restarts", "0", module=module)
    with serving as child, Client(child.url) as client:
        started = threading.Barrier(3, timeout=HANG_S)

        def tell(seen: Streamed) -> None:
            if len(seen.times) == 1:
                started.wait()

        def streaming() -> Streamed:
            return client.stream(STORY, tell, max_tokens=20_000, ignore_eos=True)

        def waiting() -> httpx.Response:
            started.wait()
            return client.post(COMPLETIONS, prompt=STORY, max_tokens=20_000, ignore_eos=True)

        with ThreadPoolExecutor(2) as pool:
            streamed, whole = pool.submit(streaming), pool.submit(waiting)
            started.wait()
            wait_until(lambda: child.live()["quire_running_sequences"] == 2)
            child.engine.send_signal(signal.SIGKILL)
            assert streamed.result().error is not None
            assert whole.result().status_code >= 500
            assert whole.result().json()["error"]["code"] == "engine_failure"
        health = client.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert client.post(COMPLETIONS, prompt=STORY).status_code >= 500
        child.process.terminate()  # by itself it ends later, see `tests/api/test_real.py`
        assert child.process.wait(HANG_S) == 1


@pytest.mark.slow
def test_a_server_that_is_told_to_end_tells_those_it_answers(tmp_path: Path) -> None:
    with quire_serve(tmp_path, "--stop-grace", "1") as child, Client(child.url) as client:
        engine = child.engine

        def stop(seen: Streamed) -> None:
            if len(seen.times) == 1:
                child.process.terminate()

        seen = client.stream(STORY, stop, max_tokens=20_000, ignore_eos=True)
        assert seen.error is not None
        assert "shutting down" in seen.error["message"]
        child.process.wait(HANG_S)
        engine.wait(HANG_S)
    assert "Traceback" not in child.log.read_text()


BAD: list[tuple[str, Any]] = [
    (CHAT, b"{"),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [10**6]}),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -3}),
    (COMPLETIONS, {"prompt": "x", "no_such_field": 1}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999999": 1}}),
]


def test_bad_requests_do_no_harm_to_running_streams(client: Client) -> None:
    alone = [client.text(prompt, **LONG) for prompt in OTHERS]
    faults: list[int] = []

    def fault(route: str, body: Any) -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return client.http.post(route, content=content, headers=JSON_TYPE).status_code

    disturb = one_by_one((partial(fault, *each) for each in BAD), faults)
    calls = [partial(client.stream, p, **LONG) for p in OTHERS[1:]]
    first = partial(client.stream, OTHERS[0], disturb, **LONG)
    streams = at_once([first, *calls])
    assert faults == [400] * len(BAD)
    assert [each.text for each in streams] == alone
    assert {each.finish for each in streams} == {"length"}


def test_an_empty_text_is_answered_or_refused(client: Client) -> None:
    answer = client.post(COMPLETIONS, prompt="", max_tokens=3)
    assert answer.status_code in (200, 400)  # by whether the tokenizer starts a text with a token
    assert client.text(STORY, **LONG)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(child: Child, stream: bool) -> None:
    body: Any = {"prompt": STORY, "max_tokens": 20_000, "ignore_eos": True, "temperature": 0}
    before = child.samples()
    with leaving(child.url, COMPLETIONS, body | {"stream": stream}):
        wait_until(lambda: child.live()["quire_running_sequences"])
    child.wait_idle()
    assert child.samples()[ABORTED] == before.get(ABORTED, 0) + 1


def test_a_client_that_goes_away_stops_the_reading_of_its_prompt(
    child: Child, client: Client
) -> None:
    prompt = list(range(300, 400)) * 300
    before = child.samples()
    with leaving(child.url, COMPLETIONS, {"prompt": prompt, "max_tokens": 1}):
        wait_until(lambda: child.samples()["quire_steps_total"] > before["quire_steps_total"])
    child.wait_idle()
    assert child.samples()[ABORTED] == before.get(ABORTED, 0) + 1
    # Pages that were read stay for the next one, but not those of the whole prompt.
    answer = client.complete(prompt[:64], max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 64


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(child: Child, client: Client) -> None:
    full = client.text(STORY, **LONG)
    stop = full[len(full) // 2 :][:5]
    before = child.samples()
    longer = {**LONG, "max_tokens": 600}  # the engine is not done before it hears of the stop
    for stream in (False, True):
        if stream:
            seen = client.stream(STORY, stop=[stop, "never to be seen"], **longer)
            text, finish = seen.text, seen.finish
        else:
            choice = client.complete(STORY, stop=stop, **longer)["choices"][0]
            text, finish = choice["text"], choice["finish_reason"]
        assert (text, finish) == (full[: full.index(stop)], "stop")
    child.wait_idle()
    after = child.samples()
    assert after[STOPPED] == before.get(STOPPED, 0) + 2
    assert after.get(ABORTED, 0) == before.get(ABORTED, 0)


def test_several_choices(client: Client) -> None:
    fields: Any = {"temperature": 2, "seed": 5, **LONG}
    choices = client.complete(STORY, n=3, **fields)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    texts = [choice["text"] for choice in choices]
    assert len(set(texts)) == 3
    assert texts[0] == client.text(STORY, **fields)


def test_a_row_does_not_depend_on_its_neighbours(client: Client) -> None:
    seeded: Any = {"temperature": 1.8, "top_p": 0.99, "seed": 11, **LONG}
    wild: Any = {"temperature": 2, **LONG}
    drawn = client.text(STORY, **seeded)
    greedy = client.text(STORY, **LONG)
    assert drawn != greedy
    calls = [partial(client.text, STORY, **seeded), partial(client.text, STORY, **LONG)]
    calls += [partial(client.text, prompt, **wild) for prompt in OTHERS]
    for _ in range(3):
        assert at_once(calls)[:2] == [drawn, greedy]


def test_logprobs(client: Client) -> None:
    choice = client.ask("What is 2 + 3?", max_tokens=5, logprobs=True, top_logprobs=3)
    entries = choice["logprobs"]["content"]
    said = "".join(entry["token"] for entry in entries)
    assert said == choice["message"]["content"] + "<turn|>"
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] == tops[0] <= 0  # greedy takes the likeliest
    with_company = at_once(
        [partial(client.ask, "What is 2 + 3?", max_tokens=5, logprobs=True, top_logprobs=3)]
        + [partial(client.ask, other, **LONG) for other in OTHERS]
    )[0]["logprobs"]["content"]
    for entry, again in zip(entries, with_company, strict=True):
        assert again["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)


def test_a_prompt_that_is_too_long_is_told_both_numbers(client: Client) -> None:
    context = client.http.get("/v1/models").json()["data"][0]["context_length"]
    answer = client.post(COMPLETIONS, prompt=[300] * (context + 7))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(context + 7) in error["message"]
    assert str(context) in error["message"]


def test_an_unknown_model_is_not_found(client: Client) -> None:
    answer = client.post(CHAT, model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "quire-demo" in answer.json()["error"]["message"]


def test_text_to_tokens_and_back(client: Client) -> None:
    text = "Größe: 東京 🙂 and plain words"
    tokens = client.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert client.post("/detokenize", tokens=tokens).json()["prompt"] == text
    messages = [{"role": "user", "content": text}]
    count = client.post("/tokenize", messages=messages).json()["count"]
    answer = client.post(CHAT, messages=messages, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == count


@pytest.mark.slow
def test_a_small_budget_makes_requests_wait_and_loses_none(tmp_path: Path) -> None:
    limits = ("--kv-memory", "3MB", "--max-context", "256")
    prompts = [[300 + n, *range(400 + n, 540 + n)] for n in range(10)]
    with quire_serve(tmp_path, *limits) as child, Client(child.url) as client:
        alone = [client.text(prompt, **LONG) for prompt in prompts[:2]]
        pressed = threading.Event()

        def ask(prompt: list[int]) -> dict[str, Any]:
            """Ask again and again until the budget is too small for all."""
            answer = client.complete(prompt, **LONG)
            while not pressed.is_set():
                answer = client.complete(prompt, **LONG)
            return answer

        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(at_once, [partial(ask, prompt) for prompt in prompts])

            def over() -> bool:
                samples = child.samples()
                pages = [v for k, v in samples.items() if k.startswith("quire_kv_bytes{")]
                assert sum(pages) <= samples["quire_kv_budget_bytes"]
                if samples["quire_waiting_sequences"]:
                    pressed.set()
                return answering.done()

            try:
                wait_until(over, lambda: f"some had to wait: {pressed.is_set()}")
            finally:
                pressed.set()
            answers = answering.result()
        choices = [answer["choices"][0] for answer in answers]
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        assert [choice["text"] for choice in choices[:2]] == alone
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {LONG["max_tokens"]}
        too_long = client.post(COMPLETIONS, prompt=[300] * 300)
        assert too_long.status_code == 400
        child.wait_idle()


def test_chat_through_a_pipe(child: Child, client: Client) -> None:
    question = "What is 2 + 3?"
    command = [sys.executable, "-m", "quire", "chat", "--url", child.url, "--temperature", "0"]
    said = subprocess.run(
        command, input=f"{question}\n", capture_output=True, text=True, timeout=HANG_S
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == client.ask(question)["message"]["content"].strip()
