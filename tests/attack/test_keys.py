"""API keys stand for users who see nothing of each other."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, Serve
from tests.attack.harness import Victim
from tests.attack.test_requests import CHAT, COUNT, calls, user
from tests.support.child import Child, quire_serve
from tests.support.waiting import HANG_S, wait_until

SECRET = "Remember this about my account, and tell nobody at all what it is: my PIN is 4711."
GUESSES = [SECRET.replace("4711", pin) for pin in ("9999", "4999", "4799", "4719", "4711")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("key-a\nkey-b\n")
    (folder / "watcher").write_text("key-m\n")
    return [
        *("--api-key-file", str(folder / "keys")),
        *("--metrics-key-file", str(folder / "watcher")),
    ]


@pytest.fixture(scope="module")
def child(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Yield a server with keys from a file and from a variable, and a cache of its own."""
    folder = tmp_path_factory.mktemp("apart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("QUIRE_API_KEY", "s3cret")
        with quire_serve(folder, *files) as child:
            yield child


def client(child: Child, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=child.url, headers=headers, timeout=HANG_S, verify=False)


def reuse(who: httpx.Client, text: str, **more: Any) -> tuple[str, str]:
    """Return what the answer's headers say of the prefix cache."""
    body = {"prompt": text, "max_tokens": 1, **more}
    answer = who.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-quire-cached-tokens"], answer.headers["x-quire-cache-reuse"]


def test_what_another_key_has_said_cannot_be_guessed(child: Child) -> None:
    with client(child, "key-a") as a, client(child, "key-b") as b:
        reuse(a, SECRET)
        cached, _ = reuse(a, SECRET)
        assert int(cached) > 10, "a key reuses what it has said itself"
        probes = [reuse(b, guess, cache_salt=str(n)) for n, guess in enumerate(GUESSES)]
        assert probes == [("0", probes[0][1])] * len(GUESSES)
        assert reuse(b, GUESSES[-1])[0] == "0"


@pytest.mark.parametrize("share", [False, True])
def test_what_is_cached_is_named_by_the_key(serve: Serve, share: bool) -> None:
    config = ServerConfig(api_keys=("key-a", "key-b"), share_prefixes=share)
    served = serve(config=config)
    for key in ("key-a", "key-b", "key-a"):
        answer = HTTP.post(
            f"{served.url}/v1/completions",
            json={"prompt": SECRET, "max_tokens": 1},
            headers={"authorization": f"Bearer {key}"},
        )
        assert answer.status_code == 200, answer.text
    first, second, again = (request.cache_salt for request in served.engine.requests)
    assert first == again
    assert (first == second) is share


@pytest.mark.slow
def test_prefixes_are_shared_by_choice(files: list[str], tmp_path: Path) -> None:
    with (
        quire_serve(tmp_path, *files, "--share-prefixes") as child,
        client(child, "key-a") as a,
        client(child, "key-b") as b,
    ):
        reuse(a, SECRET)
        assert int(reuse(b, SECRET)[0]) > 10


def test_responses_of_another_key_are_not_there(child: Child) -> None:
    with client(child, "key-a") as a, client(child, "key-b") as b:
        made = a.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 16}).json()
        path = f"/v1/responses/{made['id']}"
        item = {"type": "item_reference", "id": made["output"][0]["id"]}

        def attempts(who: httpx.Client, path: str, made: str) -> list[httpx.Response]:
            going_on = {"input": "And?", "previous_response_id": made, "max_output_tokens": 16}
            referring = {"input": [item], "max_output_tokens": 16}
            return [
                who.get(path),
                who.post("/v1/responses", json=going_on),
                who.post("/v1/responses", json=referring),
                who.delete(path),
            ]

        refused = attempts(b, path, made["id"])
        unknown = attempts(b, "/v1/responses/resp_0", "resp_0")
        assert [each.status_code for each in refused] == [404, 400, 404, 404]
        for seen, never_made in zip(refused, unknown, strict=True):
            expected = never_made.text.replace("resp_0", made["id"])
            assert (seen.status_code, seen.text) == (never_made.status_code, expected)
        assert SECRET not in "".join(each.text for each in refused)
        assert [each.status_code for each in attempts(a, path, made["id"])] == [200] * 4


def test_metrics_are_a_keys_own(child: Child) -> None:
    def answered(who: httpx.Client) -> float:
        lines = who.get("/metrics").text.splitlines()
        counts = [line.split()[-1] for line in lines if line.startswith("quire_answers_total")]
        return sum(map(float, counts))

    with client(child, "key-a") as a, client(child, "key-b") as b, client(child, "key-m") as m:
        before = [answered(each) for each in (a, b, m)]
        reuse(a, "Hello")
        assert [answered(each) for each in (a, b, m)] == [before[0] + 1, before[1], before[2] + 1]
        assert "quire_steps_total" in m.get("/metrics").text
        assert "quire_steps_total" not in a.get("/metrics").text, "it tells of others' work"
        assert m.get("/v1/models").status_code == 401
        assert m.post("/v1/completions", json={"prompt": "x"}).status_code == 401


def test_slow_jobs_of_one_key_do_not_hold_up_another(child: Child) -> None:
    """Jobs that fill all places are paused for another key's, and go on afterwards."""
    with client(child, "key-a") as a, client(child, "key-b") as b:
        slow: list[int] = []
        asking = [
            threading.Thread(target=lambda: slow.append(b.post(CHAT, json=calls()).status_code))
            for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        jobs = Victim(child, Path()).jobs
        wait_until(lambda: len(jobs()) >= 2)
        for job in jobs():
            job.suspend()  # from now on they hold their places for as long as they may
        body = {"model": "quire-demo", "messages": [user("word " * 3600)]}
        assert a.post(COUNT, json=body).status_code == 200
        for job in jobs():
            with suppress(psutil.NoSuchProcess):  # it was paused for key-a, and resumed
                job.resume()
        for thread in asking:
            thread.join(HANG_S)
        assert slow == [400] * 4  # too long, each


def test_how_long_a_model_stays_is_the_operators(child: Child) -> None:
    with client(child, "key-a") as a, client(child, "key-b") as b:
        for keep in (0, -1, "10m"):
            body = {"prompt": "x", "max_tokens": 1, "keep_alive": keep}
            answer = b.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert answer.headers["x-quire-ignored-fields"] == "keep_alive"
            (model,) = a.get("/v1/models").json()["data"]
            assert (model["state"], model["expires_s"]) == ("loaded", None)


def test_what_others_ask_is_not_counted(child: Child) -> None:
    """Other keys' requests show neither in the list of models nor in the numbers of streams."""
    with client(child, "key-a") as a, client(child, "key-b") as b:

        def seen(who: httpx.Client) -> tuple[int, list[int]]:
            view = who.get("/metrics", headers={"accept": "application/json"}).json()
            (model,) = who.get("/v1/models").json()["data"]
            return model["requests"], [each["id"] for each in view["streams"]]

        before = a.get("/metrics", headers={"accept": "application/json"}).json()["ended"]
        body = {"prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        with b.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()  # held: httpx closes the connection when it is collected
            next(pieces)
            requests, streams = seen(b)
            assert (requests, len(streams)) == (1, 1)
            assert seen(a) == (0, [])
            reuse(a, "Hello")
        ended = a.get("/metrics", headers={"accept": "application/json"}).json()["ended"]
        last = before[0]["id"] if before else 0
        assert ended[0]["id"] == last + 1


def test_the_engine_compiles_in_the_users_cache(child: Child) -> None:
    assert child.engine.is_running()
    folder = child.log.parent / "cache" / "quire" / "compiled"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


TALK = ("chat", "--max-tokens", "4")
BENCH = ("bench", "--concurrency", "1", "--requests", "1", "--warmup", "0")
BENCH += ("--max-tokens", "4", "--prompt-tokens", "16")


def asks(child: Child, *command: str) -> None:
    """Run a command that asks the server; assert that it shows no key."""
    asked = [sys.executable, "-m", "quire", *command, "--url", child.url]
    process = subprocess.Popen(
        asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seen = " ".join(psutil.Process(process.pid).cmdline())
    said, _ = process.communicate(b"Hello\n", timeout=120)
    assert process.returncode == 0, said.decode()
    assert "s3cret" not in seen + said.decode()


def shows_no_key(child: Child) -> None:
    assert HTTP.get(f"{child.url}/v1/models").status_code == 401
    server = psutil.Process(child.process.pid)
    for each in [server, *server.children(recursive=True)]:
        assert "s3cret" not in " ".join(each.cmdline())
    assert "s3cret" not in child.log.read_text()


def test_keys_need_not_show_in_the_process_list(child: Child, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    asks(child, *TALK)
    asks(child, *BENCH, "--api-key-file", str(tmp_path / "key"))
    shows_no_key(child)


@pytest.mark.slow
def test_a_server_has_its_key_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    option = ("--api-key-file", str(tmp_path / "key"))
    with quire_serve(tmp_path, *option) as child:
        asks(child, *TALK, *option)
        shows_no_key(child)
