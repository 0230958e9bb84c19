"""Whatever a request starts ends with it, at whichever await it is cut off.

Each endpoint is asked again and again, and cut off one await later each time: by a cancellation, or
by a client that leaves. Afterwards nothing of it is left: no child process, no place of a job, no
hold on the model, no slot, no request in the engine, no task.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import psutil
import pytest
from starlette.applications import Starlette

from quire.api import server
from quire.api.app import build_app
from quire.core.config import EngineConfig, ModelConfig, ServerConfig
from quire.demo import MODEL_DIR
from quire.serving.engine_process import WORKER
from quire.serving.models import Models
from tests.support.cutting import CutOff, Way
from tests.support.waiting import HANG_S

CONFIG = ServerConfig(served_name="demo", log_level="warning")
MODEL = ModelConfig(EngineConfig(str(MODEL_DIR), max_context=8192, kv_memory=8 << 20), CONFIG)
_SOME, _ALL = (4, 9), (1 << 30, 1)
"""Awaits that are all tried, and of the later ones every so many: a stream's are alike."""


def _said(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


LONG = "word " * 3500
"""A body that is read in a job."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}


def _schema(number: int) -> dict[str, Any]:
    """Return a schema that no earlier request has had compiled."""
    named = {"name": "s", "schema": {**SCHEMA, "title": f"t{number}", "required": ["a"]}}
    return {"type": "json_schema", "json_schema": named}


REQUESTS: dict[str, Callable[[int], tuple[str, str, object]]] = {
    "chat": lambda _: ("POST", "/v1/chat/completions", _said(max_tokens=3)),
    "chat, two choices": lambda _: ("POST", "/v1/chat/completions", _said(max_tokens=3, n=2)),
    "chat, streamed": lambda _: ("POST", "/v1/chat/completions", _said(max_tokens=5, stream=True)),
    "chat, read in a job": lambda _: ("POST", "/v1/chat/completions", _said(LONG, max_tokens=2)),
    "chat with a schema": lambda number: (
        "POST",
        "/v1/chat/completions",
        _said(max_tokens=3, response_format=_schema(number)),
    ),
    "completions": lambda _: (
        "POST",
        "/v1/completions",
        {"model": "demo", "prompt": ["a", "b"], "max_tokens": 3, "stream": True},
    ),
    "messages": lambda _: ("POST", "/v1/messages", _said(max_tokens=3)),
    "messages, streamed": lambda _: ("POST", "/v1/messages", _said(max_tokens=5, stream=True)),
    "count_tokens": lambda _: ("POST", "/v1/messages/count_tokens", _said(LONG)),
    "responses": lambda _: (
        "POST",
        "/v1/responses",
        {"model": "demo", "input": "Hello", "max_output_tokens": 3, "stream": True},
    ),
    "input_tokens": lambda _: (
        "POST",
        "/v1/responses/input_tokens",
        {"model": "demo", "input": LONG},
    ),
    "tokenize": lambda _: ("POST", "/tokenize", {"model": "demo", "prompt": LONG}),
    "detokenize": lambda _: ("POST", "/detokenize", {"model": "demo", "tokens": [5] * 9000}),
    "load": lambda _: ("POST", "/models/load", {"model": "demo"}),
    "models": lambda _: ("GET", "/v1/models", None),
    "metrics": lambda _: ("GET", "/metrics", None),
    "health": lambda _: ("GET", "/health", None),
}


class Running:
    """An application in this process, with a real engine and real jobs."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children())
        self.models = Models(
            [MODEL],
            partial(server._open, WORKER, lambda *_: None, started=iter(()), forked=iter(())),
        )
        self.app: Starlette = build_app(self.models, CONFIG)

    @property
    def children(self) -> set[psutil.Process]:
        """The engine, and the first processes of jobs."""
        return set(psutil.Process().children()) - self._before

    @property
    def grandchildren(self) -> int:
        """Jobs."""
        return sum(len(each.children()) for each in self.children)

    async def left_over(self) -> dict[str, object]:
        """Return what is in flight, by name; empty where nothing is."""
        model = self.models.default
        found: dict[str, object] = {"users": model.users, "waiting": model.waiting}
        if model.loaded is not None:
            jobs, sandbox = model.loaded.jobs, model.loaded.service.constraints._sandbox
            assert jobs is not None
            stats = await model.loaded.service.client.stats()
            found |= {"rows": stats.running + stats.waiting, "jobs": jobs.places.running}
            found |= {"grammars": sandbox._jobs.places.running}
        asked = CutOff(self.app, "left", 1 << 30, "GET", "/metrics")
        await asked.run()
        (in_flight,) = [
            line for line in asked.text.decode().splitlines() if line.startswith("quire_http_in_f")
        ]
        found["slots"] = float(in_flight.split()[1])
        found["children of children"] = self.grandchildren
        return {name: count for name, count in found.items() if count}

    async def settled(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Waits until nothing is left of a request."""
        left: object = None
        try:
            async with asyncio.timeout(HANG_S):
                while left := (await self.left_over() or asyncio.all_tasks() - tasks):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"left over: {left}")


@asynccontextmanager
async def running(*, loaded: bool = True) -> AsyncIterator[Running]:
    made = Running()
    try:
        if loaded:
            await made.models.open()
        yield made
    finally:
        await made.models.close()
        assert not made.children


async def cut_everywhere(
    made: Running,
    way: Way,
    request: Callable[[int], tuple[str, str, object]],
    first: int,
    every: int,
) -> int:
    """Cuts a request off at each await until it is over before that; how often it was cut."""
    tasks = asyncio.all_tasks()
    await CutOff(made.app, way, 1 << 30, *request(10_000)).run()  # opens what is opened once
    await made.settled(tasks)
    tasks, at, cuts = asyncio.all_tasks(), 0, 0
    while True:
        asked = CutOff(made.app, way, at, *request(at))
        async with asyncio.timeout(HANG_S):
            await asked.run()
        await made.settled(tasks)
        if not asked.cut:
            assert asked.status == 200, asked.text
            return cuts
        cuts += 1
        at += 1 if at < first else every


@pytest.mark.parametrize("awaits", [_SOME, pytest.param(_ALL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["cancelled", pytest.param("left", marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_request_that_is_cut_off_at_any_await(
    way: Way, awaits: tuple[int, int]
) -> None:
    async def check() -> None:
        async with running() as made:
            for name, request in REQUESTS.items():
                cuts = await cut_everywhere(made, way, request, *awaits)
                assert cuts > 0 or name in ("health", "models"), name

    asyncio.run(check())


@pytest.mark.parametrize(
    ("way", "ats"),
    [
        ("cancelled", (3,)),
        pytest.param("left", (2,), marks=pytest.mark.slow),
        pytest.param("cancelled", range(12), marks=pytest.mark.slow),
        pytest.param("left", range(12), marks=pytest.mark.slow),
    ],
)
def test_an_unloading_that_is_cut_off_at_any_await_leaves_no_process(
    way: Way, ats: Iterable[int]
) -> None:
    """Each time the model is loaded anew, and unloaded by a request that is cut off."""

    async def check() -> None:
        async with running() as made:
            for at in ats:
                await CutOff(made.app, way, 1 << 30, *REQUESTS["load"](0)).run()
                await CutOff(made.app, way, 1 << 30, *REQUESTS["chat with a schema"](at)).run()
                asked = CutOff(made.app, way, at, "POST", "/models/unload", {"model": "demo"})
                await asked.run()
                model = made.models.default
                if model.state == "unloaded":
                    assert not made.children, f"cut off at await {at}"
                else:
                    assert model.state == "loaded"
                if not asked.cut:
                    assert json.loads(asked.text)["state"] == "unloaded"
                    return

    asyncio.run(check())


@pytest.mark.parametrize(
    ("way", "ats"),
    [
        pytest.param("cancelled", (0, 5), marks=pytest.mark.slow),
        ("left", (2,)),
        pytest.param("cancelled", (2,), marks=pytest.mark.slow),
        pytest.param("left", (0, 5), marks=pytest.mark.slow),
    ],
)
def test_a_loading_whose_client_leaves_at_any_await_leaves_one_owner(
    way: Way, ats: Iterable[int]
) -> None:
    """The model is loaded all the same, for whoever asks next; closing ends all of it."""

    async def check() -> None:
        tasks = asyncio.all_tasks()
        for at in ats:
            async with running(loaded=False) as made:
                await CutOff(made.app, way, at, *REQUESTS["chat"](0)).run()
                assert made.models.default.users == 0
                assert made.models.default.waiting == 0
            assert asyncio.all_tasks() == tasks

    asyncio.run(check())
