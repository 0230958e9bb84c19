"""Kernel launches of a step on a Mac, counted on a CPU, beside mlx-lm's step of the same model."""

from __future__ import annotations

import pytest

from tests.support.launches import LEVEL, MORE, counted, launches, launches_of_mlx_lm

EVERYDAY = ("llama", "gemma4_moe")


@pytest.mark.parametrize(
    "name",
    [each if each in EVERYDAY else pytest.param(each, marks=pytest.mark.slow) for each in LEVEL],
)
def test_a_step_launches_no_more_than_mlx_lms(name: str) -> None:
    config = counted(name)
    own, theirs = launches(config), launches_of_mlx_lm(config)
    assert own.total() <= theirs.total() + MORE.get(name, 0), own - theirs
