"""Several models behind one server, each with real engines in processes of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.demo import MODEL_DIR
from tests.support.child import Child, quire_serve
from tests.support.server import JSON_TYPE
from tests.support.waiting import HANG_S, wait_until

CHAT = "/v1/chat/completions"
SUM = [{"role": "user", "content": "What is 27 plus 45?"}]


def _runs(process: psutil.Process, module: str) -> bool:
    with suppress(psutil.NoSuchProcess):  # it has ended
        return module in process.cmdline()
    return False


class House:
    """A server of two models, and what a client sees of it.

    Attributes:
        before: bytes of its children before a model was loaded.
    """

    def __init__(self, child: Child) -> None:
        self.child = child
        self.http = httpx.Client(base_url=child.url, timeout=HANG_S, verify=False)
        self.before = self.rss()

    def ask(self, model: str, *, padding: bool = False, **fields: Any) -> httpx.Response:
        """Return the answer of a model; a body with padding is read by a job."""
        body = json.dumps({"model": model, "messages": SUM, "temperature": 0, **fields})
        content = body + " " * (padding << 16)
        return self.http.post(CHAT, content=content, headers=JSON_TYPE)

    def states(self) -> dict[str, str]:
        return {each["id"]: each["state"] for each in self.http.get("/v1/models").json()["data"]}

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.child.process.pid).children(recursive=True)

    def engines(self) -> list[psutil.Process]:
        return [each for each in self.children() if _runs(each, "quire.engine.worker")]

    def rss(self) -> int:
        return sum(each.memory_info().rss for each in self.children())

    def unload(self, model: str) -> dict[str, Any]:
        answer = self.http.post("/models/unload", json={"model": model})
        assert answer.status_code == 200
        told: dict[str, Any] = answer.json()
        return told


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    models = (f"left={MODEL_DIR}", f"right={MODEL_DIR}")
    folder = tmp_path_factory.mktemp("models")
    with quire_serve(folder, *models, module="tests.e2e.several_models") as child:
        yield House(child)


def test_a_model_is_loaded_when_asked_for(house: House) -> None:
    assert house.states() == {"left": "unloaded", "right": "unloaded"}
    assert not house.engines()
    for count, name in enumerate(("left", "right"), start=1):
        answer = house.ask(name).json()
        assert answer["model"] == name
        assert "72" in answer["choices"][0]["message"]["content"]
        assert len(house.engines()) == count


def test_unknown_names_get_404_and_no_name_the_first(house: House) -> None:
    refused = house.ask("middle")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    body = {"messages": SUM, "max_tokens": 1}
    assert house.http.post(CHAT, json=body).json()["model"] == "left"


@pytest.mark.slow
def test_a_large_request_finds_its_model_too(house: House) -> None:
    padding = [{"role": "user", "content": "word " * 140_000}]
    body = json.dumps({"messages": padding, "max_tokens": 1, "model": "right"})
    refused = house.http.post(CHAT, content=body, headers=JSON_TYPE)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert house.states()["right"] == "loaded"


@pytest.mark.parametrize(
    ("process", "problem"),
    [
        pytest.param("engine.worker", "signal 9", marks=pytest.mark.slow),
        ("serving.tokenizer_worker", "tokenizer ended"),
    ],
)
def test_a_fault_leaves_the_other_alone(house: House, process: str, problem: str) -> None:
    for name in ("left", "right"):
        house.ask(name, max_tokens=1)
    next(each for each in house.children() if f"quire.{process}" in each.cmdline()).kill()
    if process != "engine.worker":  # whose death is seen when it is called
        assert sorted(house.ask(name).status_code for name in ("left", "right")) == [200, 503]
    wait_until(lambda: "failed" in house.states().values())
    (failed,) = [name for name, state in house.states().items() if state == "failed"]
    other = "right" if failed == "left" else "left"
    listed = {each["id"]: each for each in house.http.get("/v1/models").json()["data"]}
    assert problem in listed[failed]["problem"]
    assert house.http.get("/health").status_code == 200
    assert house.ask(other).status_code == 200
    assert "72" in house.ask(failed).json()["choices"][0]["message"]["content"]
    assert set(house.states().values()) == {"loaded"}


def test_figures_are_told_apart_by_model(house: House) -> None:
    for name in ("left", "right"):
        house.ask(name, max_tokens=2)
    text = house.http.get("/metrics").text
    for name in ("left", "right"):
        assert re.search(rf'^quire_generated_tokens_total{{model="{name}"}} \d', text, re.MULTILINE)
        assert f'quire_models{{model="{name}",state="loaded"}} 1.0' in text
        assert re.search(rf'^quire_kv_bytes{{model="{name}",pool=', text, re.MULTILINE)
    states = house.http.get("/health").json()["models"]
    assert states == {"left": "loaded", "right": "loaded"}


def test_a_model_goes_by_itself_or_when_told_and_its_memory_comes_back(house: House) -> None:
    for name in ("left", "right"):
        house.ask(name, padding=True)  # its process that starts jobs is there, too
    engines, both = {each.pid for each in house.engines()}, house.rss()
    answer = house.ask("left", max_tokens=1, keep_alive=0)
    assert "x-quire-ignored-fields" not in answer.headers
    wait_until(lambda: house.states()["left"] == "unloaded")
    wait_until(lambda: len(house.engines()) == 1)
    (right,) = house.engines()
    (gone,) = engines - {right.pid}
    wait_until(lambda: not psutil.pid_exists(gone))
    one = house.rss()
    assert house.unload("right")["state"] == "unloaded"
    assert not house.engines()
    # A process of half the whole went each time: nothing of a model stays behind.
    assert both - one > 0.3 * (both - house.before)
    assert house.rss() <= house.before + 0.1 * (both - house.before)


_UNREAD = """
import sys
from quire.api import opening
from quire.cli import main

def unread(*_):
    raise ValueError("odd")

opening.assemble = unread
sys.exit(main())
"""


@pytest.mark.slow
def test_a_folder_that_nobody_understands_is_named_at_the_start() -> None:
    """The error names the folder, whatever exception reading it raises."""
    last = refused_at_the_start(MODEL_DIR, "-c", _UNREAD)
    assert last == f"quire: {MODEL_DIR}: a file cannot be understood (ValueError: odd)"


@pytest.mark.slow
def test_a_value_out_of_bounds_is_named_at_the_start(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL_DIR, tmp_path / "odd")
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["feature_extractor"]["sampling_rate"] = 10**30
    (folder / "processor_config.json").write_text(json.dumps(settings))
    last = refused_at_the_start(folder, "-m", "quire")
    assert last.startswith(
        f"quire: {folder}/processor_config.json: feature_extractor.sampling_rate"
    )


def refused_at_the_start(folder: Path, *program: str) -> str:
    """Return the last line of a server that does not start."""
    ended = subprocess.run(
        [sys.executable, *program, "serve", "--port", "0", str(folder)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]
