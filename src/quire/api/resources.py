"""Builds the operations of resources: things that the server keeps, by id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.api.operations import EndpointOf, Operation
from quire.api.shared.schema import Wire


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of things under one path, whose operations it builds.

    Attributes:
        path: path of all of them.
        one: what each is, without an article, for the operations' summaries.
        many: what they are.
        stored: error statuses of operations that create one.
        found: error statuses of all others.
        key: name of the id in paths.
        article: of `one`.
    """

    path: str
    one: str
    many: str
    stored: tuple[int, ...] = ()
    found: tuple[int, ...] = (404,)
    key: str = "id"
    article: str = "a"

    @property
    def own(self) -> str:
        """The path of one of them."""
        return f"{self.path}/{{{self.key}}}"

    def create(
        self, endpoint: EndpointOf, summary: str, body: type[Wire] | None = None
    ) -> Operation:
        """Return the operation that makes one."""
        return Operation(
            endpoint, "post", self.path, summary=summary, body=body, statuses=self.stored
        )

    def list(self, endpoint: EndpointOf, query: type[Wire]) -> Operation:
        """Return the operation that lists them."""
        return Operation(
            endpoint,
            "get",
            self.path,
            summary=f"List {self.many}",
            query=query,
            statuses=self.found,
        )

    def retrieve(self, endpoint: EndpointOf) -> Operation:
        """Return the operation that shows one."""
        summary = f"Retrieve {self.article} {self.one}"
        return Operation(endpoint, "get", self.own, summary=summary, statuses=self.found)

    def update(self, endpoint: EndpointOf, body: type[Wire]) -> Operation:
        """Return the operation that replaces the metadata of one."""
        summary = f"Replace the metadata of {self.article} {self.one}"
        return Operation(
            endpoint, "post", self.own, summary=summary, body=body, statuses=self.found
        )

    def delete(self, endpoint: EndpointOf) -> Operation:
        """Return the operation that deletes one."""
        summary = f"Delete {self.article} {self.one}"
        return Operation(endpoint, "delete", self.own, summary=summary, statuses=self.found)

    def cancel(self, endpoint: EndpointOf) -> Operation:
        """Return the operation that cancels one."""
        summary = f"Cancel {self.article} {self.one}"
        return Operation(
            endpoint, "post", f"{self.own}/cancel", summary=summary, statuses=self.found
        )

    def part(self, endpoint: EndpointOf, name: str, summary: str, **more: Any) -> Operation:
        """Return the operation that shows a part of one; `more` are other fields of `Operation`."""
        return Operation(
            endpoint, "get", f"{self.own}/{name}", summary=summary, statuses=self.found, **more
        )
