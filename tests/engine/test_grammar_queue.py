"""Grammars are compiled beside the steps: in order, and dropped when nobody waits any more."""

from __future__ import annotations

import threading

import pytest

from quire.core.errors import RequestError
from quire.core.request import Request
from quire.engine.grammar_queue import GrammarQueue
from quire.scheduler.sequence import TokenConstraint
from tests.support.waiting import HANG_S


def test_nothing_waits_for_a_constraint_but_its_request() -> None:
    go_on = threading.Event()

    def make(request: Request) -> TokenConstraint | None:
        assert go_on.wait(HANG_S)
        if request.id == "bad":
            raise RequestError("no grammar")
        return None

    queue = GrammarQueue(make)
    for name in ("slow", "dropped", "bad"):
        queue.add(Request(name, (1,)))
    queue.wait(0.001)
    assert queue.take() == []
    assert queue.drop("none") is None
    dropped = queue.drop("dropped")
    assert dropped is not None
    assert dropped.id == "dropped"
    go_on.set()
    ready = []
    while queue:
        queue.wait(HANG_S)
        ready += queue.take()
    assert [request.id for request, _ in ready] == ["slow", "bad"]
    assert ready[0][1]() is None
    with pytest.raises(RequestError, match="no grammar"):
        ready[1][1]()


def test_closing_drops_what_waits_and_ends_the_thread() -> None:
    made: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def make(request: Request) -> TokenConstraint | None:
        made.append(request.id)
        started.set()
        assert go_on.wait(HANG_S)
        return None

    before = set(threading.enumerate())
    queue = GrammarQueue(make)
    for name in ("compiled", "waits"):
        queue.add(Request(name, (1,)))
    assert started.wait(HANG_S)
    queue.close()
    assert not queue
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_S)
    assert set(threading.enumerate()) <= before
    assert made == ["compiled"]


def test_keys_take_turns() -> None:
    made: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def make(request: Request) -> TokenConstraint | None:
        made.append(request.id)
        started.set()
        assert go_on.wait(HANG_S)
        return None

    queue = GrammarQueue(make)
    queue.add(Request("b0", (1,), caller="b"))
    assert started.wait(HANG_S)
    for name in ("b1", "b2", "b3", "a0"):
        queue.add(Request(name, (1,), caller=name[0]))
    go_on.set()
    ready = []
    while queue:
        queue.wait(HANG_S)
        ready += [request.id for request, _ in queue.take()]
    assert made[:2] == ["b0", "a0"]
    assert [name for name in made if name != "a0"] == ["b0", "b1", "b2", "b3"]
    assert sorted(ready) == sorted(made)
    queue.close()
