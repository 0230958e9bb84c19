"""Copies of requests' values are made without their `__init__`, and equal those of dataclasses."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest

from quire.core.copies import changed
from quire.core.request import Request, SamplingParams
from quire.serving.generation import Generation

REQUEST = Request("a", (1, 2), SamplingParams(temperature=0.5, seed=3), max_tokens=7)


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions run, those in C included."""
    calls = 0

    def count(frame: object, event: str, function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (REQUEST, {"id": "b"}),
        (REQUEST.sampling, {"seed": 9, "logprobs": 2}),
        (Generation(n=2), {"caller": "me", "prompts": ("x",)}),
    ],
)
def test_a_copy_has_the_changes_and_all_else(value: Any, changes: dict[str, Any]) -> None:
    copy = changed(value, **changes)
    assert copy == replace(value, **changes) != value
    assert pickle.loads(pickle.dumps(copy)) == copy
    assert calls_of(lambda: changed(value, **changes)) < 20


def test_a_copy_shares_no_state_with_its_original() -> None:
    copy = changed(REQUEST, id="b")
    assert (REQUEST.id, copy.id) == ("a", "b")
    with pytest.raises(FrozenInstanceError):
        copy.id = "c"  # type: ignore[misc]


def test_unknown_fields_and_classes_with_slots_are_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted:
        a: int = 0

    unknown: dict[str, Any] = {"sed": 1}
    with pytest.raises(TypeError, match="SamplingParams has no such field: sed"):
        changed(SamplingParams(), **unknown)
    with pytest.raises(TypeError):
        changed(Slotted(), a=1)
