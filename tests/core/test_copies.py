"""Changed copies equal those of `dataclasses.replace`, and call few functions."""

from __future__ import annotations

import dataclasses

import pytest

from quire.core.copies import replace
from quire.core.request import SamplingParams
from quire.serving.generation import Generation
from tests.support.work import counted

GENERATION = Generation(prompts=("text",), n=2)


def test_a_copy_differs_in_the_named_fields_alone() -> None:
    sampling = SamplingParams(seed=3)
    found = replace(GENERATION, adapter="a", sampling=sampling, n=1)
    assert found == dataclasses.replace(GENERATION, adapter="a", sampling=sampling, n=1)
    assert GENERATION.n == 2


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(KeyError):
        replace(GENERATION, colour="red")


def test_a_copy_of_many_fields_calls_few_functions() -> None:
    replace(GENERATION, n=1)
    assert counted(lambda: replace(GENERATION, n=1))[1] < 10
