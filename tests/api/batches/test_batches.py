"""`/v1/files`, `/v1/batches` and `/v1/messages/batches` with the official clients."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from starlette.responses import JSONResponse

from quire.api.app import build_app
from quire.api.batches import lines, store
from quire.api.batches.lines import Answers
from quire.api.batches.runner import BatchRunner
from quire.api.batches.store import BatchRecord, CallerFiles, FileRecord, FileStore, new_id
from quire.core.config import ServerConfig
from quire.core.errors import NotFound, QuireError, TooLarge
from quire.core.request import Request
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, NAME, Served, openai_client, start
from tests.support.scripted_engine import Script
from tests.support.server import one_model
from tests.support.waiting import wait_until


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def keeping(tokenizer: Tokenizer, folder: Path) -> Iterator[Served]:
    """Yield a server that keeps files."""
    with ExitStack() as stack:
        yield start(stack, tokenizer, ServerConfig(files=str(folder)))


@pytest.fixture
def served(keeping: Served) -> Served:
    tokens = keeping.ids("Hello.")
    keeping.engine.reset(lambda _: Script(tokens))
    return keeping


def upload(client: OpenAI, text: str) -> str:
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def ended(client: OpenAI, batch_id: str) -> Batch:
    """Return a batch that is over."""

    def over() -> bool:
        return client.batches.retrieve(batch_id).status in (
            "completed",
            "failed",
            "cancelled",
            "expired",
        )

    wait_until(over)
    return client.batches.retrieve(batch_id)


def lines_of(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    read = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    return {each["custom_id"]: each["response"] for each in read}


def test_a_batch_is_answered_behind_live_requests(served: Served) -> None:
    client = openai_client(served.url)
    file_id = upload(client, "".join(line(f"r{n}", prompt="x") for n in range(5)) + line("bad"))
    batch = client.batches.create(
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"for": "test"},
    )
    assert batch.status == "validating"
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "test"}
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    good, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert set(good) == {f"r{n}" for n in range(5)}
    assert good["r0"]["body"]["choices"][0]["text"] == "Hello."
    assert good["r0"]["request_id"]
    assert bad["bad"]["status_code"] == 400
    assert bad["bad"]["body"]["error"]["param"] == "prompt"
    assert {each.priority for each in served.engine.requests} == {1}
    assert batch.id in [each.id for each in client.batches.list(limit=5)]


def test_files_are_kept_until_they_are_deleted(served: Served) -> None:
    client = openai_client(served.url)
    ids = [upload(client, line(str(n), prompt="x")) for n in range(3)]
    kept = client.files.retrieve(ids[0])
    assert (kept.filename, kept.purpose, kept.status) == ("in.jsonl", "batch", "processed")
    assert kept.bytes == len(line("0", prompt="x"))
    assert {each.id for each in client.files.list(limit=2, purpose="batch")} >= set(ids)
    assert client.files.content(ids[1]).text == line("1", prompt="x")
    assert client.files.delete(ids[0]).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(ids[0])
    with pytest.raises(openai.BadRequestError, match="batches only") as refused:
        client.files.create(file=b"x", purpose="vision")
    assert (refused.value.param, refused.value.code) == ("purpose", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="no file 'file-x'") as missing:
        client.batches.create(
            input_file_id="file-x", endpoint="/v1/completions", completion_window="24h"
        )
    assert (missing.value.param, missing.value.code) == ("input_file_id", "not_found")
    for path in ("../in.jsonl", "file-", ids[1] + ".json"):
        assert HTTP.get(f"{served.url}/v1/files/{path}/content").status_code == 404


@pytest.mark.parametrize(
    ("text", "said", "number"),
    [
        (line("a", prompt="x") + "{", "not valid JSON", 2),
        (line("a") * 2, "is used twice", 2),
        (line("a", "/v1/chat/completions"), "the batch is for /v1/completions", 1),
        ("\n", "has no requests", 0),
    ],
)
def test_a_file_of_something_else_fails_its_batch(
    served: Served, text: str, said: str, number: int
) -> None:
    client = openai_client(served.url)
    batch = client.batches.create(
        input_file_id=upload(client, text),
        endpoint="/v1/completions",
        completion_window="24h",
    )
    batch = ended(client, batch.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert said in (batch.errors.data[0].message or "")
    assert batch.errors.data[0].line == number
    assert not served.engine.requests


def test_values_that_are_no_json_fail_their_request_alone(served: Served) -> None:
    client = openai_client(served.url)
    text = line("good", prompt="x") + line("half", prompt="a\ud800b")
    text += line("nan", prompt="x", temperature=float("nan"))
    made = client.batches.create(
        input_file_id=upload(client, text),
        endpoint="/v1/completions",
        completion_window="24h",
    )
    batch = ended(client, made.id)
    assert batch.status == "completed"
    assert lines_of(client, batch.output_file_id).keys() == {"good", "half"}
    refused = lines_of(client, batch.error_file_id)["nan"]
    assert refused["body"]["error"]["param"] == "temperature"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_no_unexpected_error(served: Served) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        upload(openai_client(served.url), line("a", prompt="x"))
    assert raised.value.status_code == 507
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert "disk is full" in raised.value.message


@pytest.mark.parametrize("endpoint", ["files", "audio/transcriptions"])
def test_without_a_folder_of_temporary_files_large_forms_are_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    url = f"{served.url}/v1/{endpoint}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    answer = HTTP.post(url, files={"file": bytes(2 << 20)}, data={"purpose": "batch"})
    assert answer.status_code == 507, answer.text
    error = answer.json()["error"]
    assert error["code"] == "storage_failed"
    assert "folder of temporary files cannot be used (No such file" in error["message"]
    assert str(tmp_path) not in error["message"]
    small = HTTP.post(f"{served.url}/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
    assert small.status_code == 200, small.text


def test_a_batch_ends_though_the_disk_is_full(
    served: Served, request: pytest.FixtureRequest
) -> None:
    client = openai_client(served.url)
    file_id = upload(client, line("a", prompt="x"))
    endings = iter([Script(served.ids("Hello."))])

    def answer(_: Request) -> Script:
        request.getfixturevalue("full_disk")
        return next(endings)

    served.engine.reset(answer)
    made = client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    batch = ended(client, made.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].message == "No space left on device"


def test_a_batch_is_cancelled(served: Served) -> None:
    client = openai_client(served.url)
    tokens = served.ids("Hello.")

    def script(request: Request) -> Script:
        return Script(tokens, silent=len(served.engine.requests) > 2)

    served.engine.reset(script)
    file_id = upload(client, "".join(line(f"r{n}", prompt="x") for n in range(4)))
    batch = client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )

    def done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed == 2

    wait_until(done)
    with pytest.raises(openai.BadRequestError, match="needs this file"):
        client.files.delete(file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert set(lines_of(client, batch.output_file_id)) == {"r0", "r1"}
    wait_until(lambda: all(each.aborted for each in served.engine.tickets[2:]))
    client.files.delete(file_id)


def test_messages_are_batched(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}], "model": NAME}
    batch = client.messages.batches.create(
        requests=[
            {"custom_id": "good", "params": asked},  # type: ignore[typeddict-item]
            {"custom_id": "bad", "params": {**asked, "max_tokens": -5}},  # type: ignore[typeddict-item]
        ]
    )
    assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 2)
    wait_until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    batch = client.messages.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 1, 1)
    found = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    good, bad = found["good"], found["bad"]
    assert good.type == "succeeded"
    assert good.message.content[0].type == "text"
    assert good.message.content[0].text == "Hello."
    assert bad.type == "errored"
    assert "max_tokens" in bad.error.error.message
    assert batch.id in [each.id for each in client.messages.batches.list(limit=3)]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_requests_of_a_batch_of_messages_are_named_if_they_are_refused(served: Served) -> None:
    asked = {"custom_id": "a", "params": {"max_tokens": 9, "messages": [], "model": NAME}}
    streamed = {"custom_id": "b", "params": {**asked["params"], "stream": True}}  # type: ignore[dict-item]
    for requests, said in (
        ([asked, asked], "'requests[1].custom_id' is 'a', as is that of 'requests[0]'"),
        ([asked, streamed], "'requests[1].params.stream' is true"),
    ):
        answer = HTTP.post(f"{served.url}/v1/messages/batches", json={"requests": requests})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert said in error["message"]
        assert error["details"] == {"error_code": "invalid_value"}


def left_by_a_kill(folder: Path, status: str) -> str:
    """Return a batch of three requests, one of them answered, as a killed server leaves it."""
    store = FileStore(folder, (), 1 << 20)
    files = store.of("")
    texts = (line(f"r{n}", prompt="x").encode() for n in range(3))
    kept = files.add_file(texts, "in.jsonl", "batch")
    batch = BatchRecord(
        new_id("batch_"), 1, "/v1/completions", kept.id, expires_at=2**40, total=3
    ).becomes(status)  # type: ignore[arg-type]
    files.batches.put(batch)
    path = files.batches.path(batch.id, ".answers")
    with Answers(path) as answers:
        answers.add("r1", 200, "before", {"choices": []})
    with path.open("ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_id": "r')
    (path.parent / f"{batch.id}.tmp").write_text("{")
    store.close()
    return batch.id


@pytest.mark.parametrize("status", ["in_progress", "finalizing", "cancelling"])
def test_a_batch_goes_on_after_a_kill(tokenizer: Tokenizer, tmp_path: Path, status: str) -> None:
    batch_id = left_by_a_kill(tmp_path, status)
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(files=str(tmp_path)))
        tokens = served.ids("Hello.")
        served.engine.reset(lambda _: Script(tokens))
        client = openai_client(served.url)
        batch = ended(client, batch_id)
        found = lines_of(client, batch.output_file_id)
    ends = {"in_progress": "completed", "finalizing": "expired", "cancelling": "cancelled"}
    assert batch.status == ends[status]
    assert found["r1"]["request_id"] == "before"
    assert len(found) == (3 if status == "in_progress" else 1)


async def test_files_of_a_batch_are_read_outside_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be large, and other requests' streams would wait."""
    batch_id = left_by_a_kill(tmp_path, "in_progress")
    store = FileStore(tmp_path, (), 1 << 20)
    readers: list[int] = []

    def loads(text: bytes) -> Any:
        readers.append(threading.get_ident())
        return json.loads(text)

    monkeypatch.setattr(lines, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    runner = BatchRunner(store, at_once=2)
    runner.start(JSONResponse({}))
    while not store.of("").batches.get(batch_id, "batch").over:
        await asyncio.sleep(0.01)
    await runner.close()
    assert store.of("").batches.get(batch_id, "batch").status == "completed"
    assert readers
    assert threading.get_ident() not in readers


def test_keys_see_their_own_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(files=str(tmp_path), api_keys=("one", "two"))
    with ExitStack() as stack:
        served = start(stack, tokenizer, config)
        tokens = served.ids("Hello.")
        served.engine.reset(lambda _: Script(tokens))
        clients = [openai_client(served.url).with_options(api_key=key) for key in config.api_keys]
        file_id = upload(clients[0], line("a", prompt="x"))
        with pytest.raises(openai.NotFoundError):
            clients[1].files.retrieve(file_id)
        batch = clients[0].batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )
        assert ended(clients[0], batch.id).status == "completed"
        assert served.engine.requests[0].caller
        assert not list(clients[1].batches.list())


def test_without_a_folder_nothing_is_kept(shared: Served) -> None:
    for path in ("files", "batches", "messages/batches"):
        answer = HTTP.get(f"{shared.url}/v1/{path}")
        assert answer.status_code == 501
        assert "--files DIR" in answer.text


def test_a_folder_serves_one_server(keeping: Served, folder: Path) -> None:
    config = ServerConfig(files=str(folder))
    with pytest.raises(QuireError, match="another server uses"):
        build_app(one_model(keeping.engine, NAME, config), config)


def test_files_have_a_limit(tmp_path: Path) -> None:
    files = CallerFiles(tmp_path, 10)
    files.add_file([b"12345"], "a", "batch", expires_at=1)
    files.add_file([b"12345"], "b", "batch")
    with pytest.raises(TooLarge, match="--files-bytes"):
        files.add_file([b"123", b"456"], "c", "batch")
    assert [each.filename for each in files.files] == ["b"]
    assert len(list(files.files.folder.iterdir())) == 2


def test_expired_files_are_gone_unless_a_batch_reads_them(served: Served, folder: Path) -> None:
    client = openai_client(served.url)
    files = [FileRecord(new_id("file-"), 1, 1, "in", "batch", expires_at=2) for _ in range(2)]
    batch = BatchRecord(new_id("batch_"), 1, "/v1/completions", files[0].id, "in_progress")
    own = CallerFiles(folder / "everyone", 1 << 20)
    for each in files:
        own.files.path(each.id).write_text("x")
        own.files.put(each)
    own.batches.put(batch)
    own.drop_expired()
    assert own.files.get(files[0].id, "file").expires_at == 2
    with pytest.raises(NotFound):
        own.files.get(files[1].id, "file")
    assert not own.files.path(files[1].id).exists()
    own.batches.put(batch.becomes("failed"))
    # An expired file is not served, though nothing was uploaded since.
    form = {"purpose": "batch", "expires_after[seconds]": "3600"}
    url = f"{served.url}/v1/files"
    made = HTTP.post(url, files={"file": b"x"}, data=form).json()
    assert client.files.retrieve(made["id"]).expires_at == made["expires_at"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "time", SimpleNamespace(time=lambda: made["expires_at"]))
        with pytest.raises(openai.NotFoundError):
            client.files.content(made["id"])


def test_contents_that_were_deleted_from_disk_are_no_unexpected_error(
    served: Served, folder: Path
) -> None:
    client = openai_client(served.url)
    file_id = upload(client, line("a", prompt="x"))
    (folder / "everyone" / "files" / file_id).unlink()
    with pytest.raises(openai.NotFoundError, match="deleted from the server's disk"):
        client.files.content(file_id)
    assert client.files.delete(file_id).deleted


def test_a_removed_folder_is_an_error_of_storage(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder, away = tmp_path / "files", tmp_path / "away"
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(files=str(folder)))
        served.engine.reset(lambda _: Script(served.ids("Hello."), silent=True))
        client = openai_client(served.url)
        file_id = upload(client, line("a", prompt="x"))

        def batch() -> Batch:
            return client.batches.create(
                input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
            )

        running = batch()
        wait_until(lambda: bool(served.engine.requests))
        folder.rename(away)
        anthropics = {"custom_id": "a", "params": {"model": NAME}}
        for attempt in (
            lambda: upload(client, line("b", prompt="x")),
            batch,
            lambda: client.batches.cancel(running.id),
            lambda: client.post(
                "/messages/batches", body={"requests": [anthropics]}, cast_to=object
            ),
        ):
            with pytest.raises(openai.APIStatusError) as raised:
                attempt()
            assert raised.value.status_code == 507
            assert raised.value.response.headers["x-should-retry"] == "false"
            assert "No such file or directory" in raised.value.message
            assert str(tmp_path) not in raised.value.message
        with pytest.raises(openai.NotFoundError, match="deleted from the server's disk"):
            client.files.content(file_id)
        away.rename(folder)
        client.batches.cancel(running.id)
        assert ended(client, running.id).status == "cancelled"
        assert client.files.delete(file_id).deleted


def test_files_on_a_disk_without_writes(
    served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = openai_client(served.url)
    form = {"purpose": "batch", "expires_after[seconds]": "3600"}
    expiring = HTTP.post(f"{served.url}/v1/files", files={"file": b"x"}, data=form).json()["id"]
    kept = upload(client, line("a", prompt="x"))

    def refused(path: Path, **_: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(openai.APIStatusError, match="Read-only file system") as raised:
            client.files.delete(kept)
        assert raised.value.status_code == 507
        patch.setattr(store, "time", SimpleNamespace(time=lambda: 4e9))
        listed = [each.id for each in client.files.list()]
        assert kept in listed
        assert expiring not in listed
    assert (folder / "everyone" / "files" / expiring).exists()
    assert client.files.delete(kept).deleted


def test_files_of_answers_expire_if_the_batch_says_so(served: Served) -> None:
    client = openai_client(served.url)
    fields = {"endpoint": "/v1/completions", "completion_window": "24h"}
    kept: list[bool] = []
    for expiry in ({}, {"output_expires_after": {"anchor": "created_at", "seconds": 7200}}):
        # One line is answered, the other one refused: both files are written.
        sent = upload(client, line("a", prompt="x") + line("b", prompt="x", n=-1))
        batch = client.batches.create(input_file_id=sent, **fields, **expiry)  # type: ignore[arg-type]
        done = ended(client, batch.id)
        for file_id in (done.output_file_id, done.error_file_id):
            assert file_id is not None
            file = client.files.retrieve(file_id)
            kept.append(file.expires_at is None)
            assert file.expires_at in (None, file.created_at + 7200, file.created_at + 7199)
    assert kept == [True, True, False, False]
    with pytest.raises(openai.BadRequestError, match="must be at least 3,600, not 60") as refused:
        client.batches.create(
            input_file_id=sent,
            output_expires_after={"anchor": "created_at", "seconds": 60},
            **fields,  # type: ignore[arg-type]
        )
    assert refused.value.param == "output_expires_after.seconds"


@pytest.mark.parametrize("seconds", ["9" * 5000, "3599", "x"])
def test_a_wrong_expiry_is_refused_by_name(served: Served, seconds: str) -> None:
    form = {"purpose": "batch", "expires_after[seconds]": seconds}
    answer = HTTP.post(f"{served.url}/v1/files", files={"file": b"x"}, data=form)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "expires_after"


@pytest.mark.parametrize("text", ["", "[]", '{"id": "x", "later": 1}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "everyone" / "files"
    kept.mkdir(parents=True)
    (kept / "file-1.json").write_text(text)
    with pytest.raises(QuireError, match=r"file-1\.json is damaged"):
        FileStore(tmp_path, (), 10)
