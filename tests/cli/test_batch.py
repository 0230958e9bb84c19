"""`quire batch` against a real server: answers, a kill in the middle, and wrong files."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from quire.api.batches.lines import Answers, BatchRequest
from quire.api.batches.sending import answer_request
from quire.cli import main
from quire.core.errors import QuireError
from tests.support.child import Child, quire_serve
from tests.support.waiting import wait_until


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "quire", "batch", *map(str, arguments)]


def answers(path: Path) -> dict[str, Any]:
    read = [json.loads(each) for each in path.read_text().splitlines()]
    found = {each["custom_id"]: each["response"] for each in read}
    assert len(found) == len(read), "an answer stands twice"
    return found


def test_every_request_gets_an_answer(child: Child, tmp_path: Path) -> None:
    into, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
    into.write_text(
        line("text", prompt="1 2 3", max_tokens=3, temperature=0)
        + line("chat", "/v1/chat/completions", **chat)
        + line("vector", "/v1/embeddings", input="x")
        + line("wrong", prompt="x", temperature=-1)
    )
    ran = subprocess.run(command(into, out, "--url", child.url), capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert "answering requests: 4\n" in ran.stderr
    assert "4 answered, 1 of them with an error; 0 were already there" in ran.stderr
    found = answers(out)
    assert {name: each["status_code"] for name, each in found.items()} == {
        "text": 200,
        "chat": 200,
        "vector": 200,
        "wrong": 400,
    }
    assert found["text"]["body"]["choices"][0]["text"]
    assert found["wrong"]["body"]["error"]["param"] == "temperature"


def test_a_killed_batch_goes_on(child: Child, tmp_path: Path) -> None:
    into, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    count = 24
    asked = {"max_tokens": 40, "ignore_eos": True}
    into.write_text("".join(line(f"r{n}", prompt=f"{n} is", **asked) for n in range(count)))
    arguments = command(into, out, "--url", child.url, "--concurrency", 2)
    first = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = out.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") < count
    out.write_bytes(kept + b'{"id": "batch_req_1", "custom_id": "r')  # as a full disk leaves it
    again = subprocess.run(arguments, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert out.read_bytes().startswith(kept)
    assert set(answers(out)) == {f"r{n}" for n in range(count)}
    idle = subprocess.run(arguments, capture_output=True, text=True)
    done = f"quire batch: 0 answered, 0 of them with an error; {count} were already there\n"
    assert (idle.returncode, idle.stderr) == (0, done)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not valid JSON"),
        (line("a") + line("a"), "line 2: the custom_id 'a' is used twice"),
        (line("a", "/v1/files"), "line 1: 'url' must be one of these, and 'method' POST:"),
        (line("a", stream=True), "leave out 'stream'"),
        ('{"custom_id": 5}', "needs 'custom_id', a string"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, said: str) -> None:
    into = tmp_path / "in.jsonl"
    into.write_text(text)
    ran = subprocess.run(command(into, tmp_path / "out"), capture_output=True, text=True)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_an_endless_line_ends_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["batch", "/dev/zero", str(tmp_path / "out")]) == 2
    said = "quire batch: /dev/zero: a line is larger than the limit of 256 MiB\n"
    assert capsys.readouterr().err == said


def test_one_process_writes_answers(tmp_path: Path) -> None:
    with Answers(tmp_path / "out"), pytest.raises(QuireError, match="another process"):
        Answers(tmp_path / "out")


@pytest.mark.parametrize("text", ["notes\n", "notes", '{"id": 5}'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    other = tmp_path / "other"
    other.write_text(text)
    with Answers(other) as written, pytest.raises(QuireError, match="not a batch's answers"):
        assert written.done
    assert other.read_text() == text


def test_values_that_are_no_json_fail_their_request_alone(child: Child, tmp_path: Path) -> None:
    into, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    into.write_text(
        line("half", prompt="a\ud800b", max_tokens=1)
        + line("nan", prompt="x", temperature=float("nan"))
        + line("infinite", prompt="x", temperature=float("inf"))
    )
    ran = subprocess.run(command(into, out, "--url", child.url), capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    statuses = {name: each["status_code"] for name, each in answers(out).items()}
    assert statuses == {"half": 200, "nan": 400, "infinite": 400}


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    into = tmp_path / "in.jsonl"
    into.write_text(line("a", prompt="x") + line("b", prompt="x"))
    nobody = "http://127.0.0.1:1"
    ran = subprocess.run(
        command(into, tmp_path / "out", "--url", nobody), capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert f"quire batch: no server answers at {nobody}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_answer_that_was_not_written_whole_is_removed(tmp_path: Path) -> None:
    with Answers(tmp_path / "out") as written:
        written.add("first", 200, "id", body={})
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = (tmp_path / "out").stat().st_size
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limit[1]))
            with pytest.raises(OSError, match="No space left"):
                written.add("second", 200, "id", body={})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)
        written.add("third", 200, "id", body={})
    assert list(answers(tmp_path / "out")) == ["first", "third"]


async def test_a_proxys_date_to_come_back_at_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[str] = []
    slept: list[float] = []

    def busy_once(request: httpx.Request) -> httpx.Response:
        came.append(request.url.path)
        date = {"retry-after": "Thu, 26 Nov 2026 17:00:00 GMT"}
        return httpx.Response(503, headers=date) if len(came) == 1 else httpx.Response(200, json={})

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    transport = httpx.MockTransport(busy_once)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        with Answers(tmp_path / "out") as written:
            assert await answer_request(client, BatchRequest("a", "/v1/score", b"{}"), written)
    assert slept == [1]
    assert answers(tmp_path / "out")["a"]["status_code"] == 200


@pytest.mark.slow
def test_a_servers_batch_goes_on_after_a_kill(tmp_path: Path) -> None:
    """`/v1/batches` of a server that is killed, and started again."""
    files, count = tmp_path / "files", 24
    asked = {"max_tokens": 40, "ignore_eos": True}
    text = "".join(line(f"r{n}", prompt=f"{n} is", **asked) for n in range(count))
    with quire_serve(tmp_path, "--files", str(files), "--max-sequences", "2") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        file_id = client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id
        batch = client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )
        written = files / "everyone" / "batches" / f"{batch.id}.answers"
        wait_until(lambda: written.exists() and written.read_bytes().count(b"\n") >= 3)
        server.process.kill()
        server.process.wait()
    kept = written.read_bytes()
    assert kept.count(b"\n") < count
    with quire_serve(tmp_path, "--files", str(files)) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        read = client.files.content(output).content
    assert read.startswith(kept[: kept.rfind(b"\n") + 1])
    assert {json.loads(each)["custom_id"] for each in read.splitlines()} == {
        f"r{n}" for n in range(count)
    }
