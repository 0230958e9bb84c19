"""One server for all attacks that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.conftest import serve, shared, tokenizer
from tests.attack.harness import Victim, attacked

__all__ = ["serve", "shared", "tokenizer", "victim"]


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with attacked(tmp_path_factory.mktemp("victim")) as victim:
        yield victim
