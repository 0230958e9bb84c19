"""docs/graphs.md says what graphs compute today."""

from __future__ import annotations

import pytest

from tests.models import graphed_encoders
from tests.models.make_graphs_doc import DOCUMENT, document, row
from tests.models.weights import stored_layouts


@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
def test_page_has_the_rows_of_today(model_type: str) -> None:
    assert row(model_type) in DOCUMENT.read_text().splitlines()


@pytest.mark.parametrize("layout", stored_layouts.LAYOUTS)
def test_page_says_how_checkpoints_are_stored(layout: str) -> None:
    assert stored_layouts.row(layout) in DOCUMENT.read_text().splitlines()


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_page_says_what_of_encoders_is_graphed(name: str) -> None:
    assert graphed_encoders.line(name, "image") in DOCUMENT.read_text().splitlines()


@pytest.mark.slow
def test_page_is_the_one_of_today() -> None:
    assert DOCUMENT.read_text() == document()
