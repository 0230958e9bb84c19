"""docs/models.md says what the registry and the tests say."""

from __future__ import annotations

from tests.models.make_models_doc import DOCUMENT, document


def test_the_document_is_what_the_registry_gives() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m tests.models.make_models_doc"
