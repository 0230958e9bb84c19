"""A client of the server that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.client import Client
from tests.support.child import Child


@pytest.fixture
def client(child: Child) -> Iterator[Client]:
    with Client(child.url) as client:
        yield client
