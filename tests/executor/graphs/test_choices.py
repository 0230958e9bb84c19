"""References that compute by the choices of experts that a step made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from quire.executor.inputs import StepInputs
from quire.models.layers.routers import SoftmaxRouter
from tests.support.choices import Choices
from tests.support.precise import PreciseOperations


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Choices:
    def made(inputs: Any, id: str) -> None:
        inputs.sequences = [SimpleNamespace(id=id, start=0, end=2)]
        inputs.wanted_rows = None

    monkeypatch.setattr(StepInputs, "__init__", made)
    return Choices(monkeypatch)


def chosen(id: str, logits: list[list[float]]) -> list[set[int]]:
    """Return the experts of the two rows of a step."""
    StepInputs(id)  # type: ignore[arg-type, call-arg]  # the fixture's
    router = SoftmaxRouter(2, normalise=True)
    found, _ = PreciseOperations().route(mx.array(logits), None, per_expert=None, router=router)
    return [set(each) for each in found.tolist()]


def test_a_reference_chooses_what_rounding_made_a_step_choose(choices: Choices) -> None:
    assert chosen("step", [[0, 1, 2, 3.0], [3, 2, 1, 0.0]]) == [{2, 3}, {0, 1}]
    choices.follow("step")
    assert chosen("reference", [[0, 2.001, 2, 3], [3, 2, 1, 0]]) == [{2, 3}, {0, 1}]
    assert choices.turned == 1
    assert not choices.impossible


def test_a_choice_that_rounding_cannot_make_is_noted(choices: Choices) -> None:
    chosen("step", [[0, 1, 2, 3.0], [3, 2, 1, 0.0]])
    choices.follow("step")
    chosen("reference", [[0, 1, 2, 3], [1, 2, 3, 0]])
    assert choices.impossible == [(("reference", 1), 0)]
