"""One real server with the embedded model for all tests that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.client import Client
from tests.support.child import Child, quire_serve


@pytest.fixture(scope="package")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with quire_serve(tmp_path_factory.mktemp("serve")) as child:
        yield child
        assert child.process.poll() is None, f"the server died: {child.log.read_text()}"


@pytest.fixture
def client(child: Child) -> Iterator[Client]:
    with Client(child.url) as client:
        yield client
