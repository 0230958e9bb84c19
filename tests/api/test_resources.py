"""The operations of things that are kept, built in one place."""

from __future__ import annotations

from quire.api.resources import Resource
from quire.api.routes import OPERATIONS


def test_operations_of_a_resource_lie_under_its_path() -> None:
    things = Resource("/v1/things", "thing", "the things", stored=(429,))
    made = things.create(lambda e: e.document, "Create a thing")
    assert (made.method, made.path, made.statuses) == ("post", "/v1/things", (429,))
    gone = things.delete(lambda e: e.document)
    assert (gone.method, gone.path, gone.summary) == (
        "delete",
        "/v1/things/{id}",
        "Delete a thing",
    )
    part = things.part(lambda e: e.document, "parts", "List its parts", answers=())
    assert (part.path, part.answers, part.statuses) == ("/v1/things/{id}/parts", (), (404,))


def test_no_operation_stands_twice() -> None:
    assert len({(each.method, each.path) for each in OPERATIONS}) == len(OPERATIONS)
