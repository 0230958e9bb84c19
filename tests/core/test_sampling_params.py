"""Refused sampling parameters, and the names in their errors."""

from __future__ import annotations

import math

import pytest

from quire.core.errors import RequestError
from quire.core.request import SamplingParams
from quire.core.sampling_params import MAX_LOGPROBS, check_sampling

REFUSED: list[tuple[str, dict[str, object]]] = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -1}),
    ("typical_p", {"typical_p": 0.0}),
    ("min_p", {"min_p": -0.5}),
    ("min_p", {"min_p": 2.0}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -math.inf}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": MAX_LOGPROBS + 1}),
    ("logit_bias", {"logit_bias": ((100, 1.0),)}),
    ("logit_bias", {"logit_bias": ((-1, 1.0),)}),
    ("logit_bias", {"logit_bias": ((1, 100.5),)}),
    ("logit_bias", {"logit_bias": ((1, math.nan),)}),
]


@pytest.mark.parametrize(("field", "values"), REFUSED)
def test_what_the_sampler_does_not_define_is_refused_by_name(
    field: str, values: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        check_sampling(SamplingParams(**values), 100)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert caught.value.code == "invalid_value"


def test_the_limits_themselves_are_allowed() -> None:
    check_sampling(SamplingParams(), 100)
    check_sampling(
        SamplingParams(
            temperature=0,
            top_p=1,
            top_k=10**9,
            min_p=1,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=0.1,
            logit_bias=((0, -100.0), (99, 100.0)),
            logprobs=MAX_LOGPROBS,
        ),
        100,
    )
