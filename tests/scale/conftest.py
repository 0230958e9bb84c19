"""Servers with replicas, on a Ray of this machine's own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.child import Child, quire_serve


@pytest.fixture(scope="session")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Run `quire serve --replicas 2` with the embedded model."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with quire_serve(tmp_path_factory.mktemp("replicated"), "--replicas", "2") as child:
        yield child
