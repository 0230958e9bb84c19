"""References that compute by the choices of experts that a step made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from quire.device.mixture import Router
from quire.executor.inputs import StepInputs
from quire.models.layers.routers import SoftmaxRouter
from tests.support.choices import Choices
from tests.support.precise import PreciseOperations

PLAIN = SoftmaxRouter(2, normalise=True)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Choices:
    def made(inputs: Any, id: str) -> None:
        inputs.sequences = [SimpleNamespace(id=id, start=0, end=2)]
        inputs.wanted_rows = [1] if id == "narrowed" else None

    monkeypatch.setattr(StepInputs, "__init__", made)
    return Choices(monkeypatch)


def chosen(id: str, logits: list[list[float]], router: Router = PLAIN) -> list[set[int]]:
    """Begin a step, and return the experts of its two rows in the first layer."""
    StepInputs(id)  # type: ignore[arg-type, call-arg]  # the fixture's
    return layer(logits, router)


def layer(logits: list[list[float]], router: Router = PLAIN) -> list[set[int]]:
    """Return the experts of the next layer."""
    found, _ = PreciseOperations().route(mx.array(logits), None, per_expert=None, router=router)
    return [set(each) for each in found.tolist()]


def test_a_reference_chooses_what_rounding_made_a_step_choose(choices: Choices) -> None:
    assert chosen("step", [[0, 1.9, 2, 3.0], [3, 2, 1, 0.0]]) == [{2, 3}, {0, 1}]
    choices.follow("step")
    assert chosen("reference", [[0, 2.1, 2, 3], [3, 2, 1, 0]]) == [{2, 3}, {0, 1}]
    assert choices.turned == 1
    assert not choices.impossible


def test_rounding_may_choose_other_groups_of_experts(choices: Choices) -> None:
    """Expert 2 is better than expert 1, but the third group may be better than the second one."""
    router = SoftmaxRouter(2, normalise=True, groups=3, best_groups=2, counted=2)
    step, own = [3, 1.5, 2, 0, 1.45, 1.45], [3, 1.5, 2, 0, 1.4, 1.4]
    assert chosen("step", [step, own], router) == [{0, 1}, {0, 2}]
    choices.follow("step")
    assert chosen("reference", [own, step], router) == [{0, 1}, {0, 2}]
    assert not choices.impossible


def test_of_equal_scores_a_reference_chooses_as_the_step_did(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        made = mx.array([[1, 3], [2, 3]]), mx.ones((2, 2))
        patch.setattr(SoftmaxRouter, "route", lambda *_: made)
        chosen("step", [[0, 2, 2, 3.0], [0, 2, 2, 3.0]])
    choices.follow("step")
    assert chosen("reference", [[0, 1.99, 2, 3], [0, 2, 1.99, 3]]) == [{1, 3}, {2, 3}]
    assert choices.turned == 2
    assert not choices.impossible


def test_rows_that_the_last_layers_leave_out_are_not_followed(choices: Choices) -> None:
    logits = [[0, 1, 2, 3.0], [3, 2, 1, 0.0]]
    chosen("narrowed", logits)
    layer(logits[1:])
    choices.follow("narrowed")
    chosen("reference", logits)
    assert layer(logits[::-1]) == [{0, 1}, {0, 1}]
    assert choices.turned == 1
    assert not choices.unknown


def test_a_choice_that_rounding_cannot_make_is_noted(choices: Choices) -> None:
    chosen("step", [[0, 1, 2, 3.0], [3, 2, 1, 0.0]])
    choices.follow("step")
    chosen("reference", [[0, 1, 2, 3], [1, 2, 3, 0]])
    ((row, number, error),) = choices.impossible
    assert (row, number) == (("reference", 1), 0)
    assert error > 1


def test_a_choice_that_does_not_follow_from_its_scores_is_noted(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = PLAIN.route
    with monkeypatch.context() as patch:
        patch.setattr(SoftmaxRouter, "route", lambda _, logits, given: worst(-logits, given))
        chosen("step", [[0, 1, 2, 3.0], [3, 2, 1, 0.0]])
    choices.follow("step")
    chosen("reference", [[0, 1, 2, 3], [3, 2, 1, 0]])
    assert choices.impossible == [
        (("reference", 0), 0, 0.0),
        (("reference", 1), 0, 0.0),
    ]
