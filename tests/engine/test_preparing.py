"""Grammars are compiled beside the steps: in order, and dropped when nobody waits any more."""

from __future__ import annotations

import threading

import pytest

from quire.core.errors import RequestError
from quire.core.request import Request
from quire.engine.preparing import Preparing
from quire.scheduler.sequence import TokenConstraint


def test_nothing_waits_for_a_constraint_but_its_request() -> None:
    go_on = threading.Event()

    def make(request: Request) -> TokenConstraint | None:
        assert go_on.wait(60)
        if request.id == "bad":
            raise RequestError("no grammar")
        return None

    preparing = Preparing(make)
    for name in ("slow", "dropped", "bad"):
        preparing.add(Request(name, (1,)))
    preparing.wait(0.001)
    assert preparing.take() == []
    assert preparing.drop("none") is None
    dropped = preparing.drop("dropped")
    assert dropped is not None
    assert dropped.id == "dropped"
    go_on.set()
    ready = []
    while preparing:
        preparing.wait(60)
        ready += preparing.take()
    assert [request.id for request, _ in ready] == ["slow", "bad"]
    assert ready[0][1]() is None
    with pytest.raises(RequestError, match="no grammar"):
        ready[1][1]()
