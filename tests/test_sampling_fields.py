"""Every list of sampling parameters that is kept by hand, compared with `SamplingParams`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

import pytest

import quire
from quire.api.ollama.schema import ModelOptions
from quire.api.shared.schema import DecodingFields
from quire.cli.model_options import SamplingOptions
from quire.core.request import SamplingParams
from quire.core.sampling_params import BOUNDS
from quire.llm.options import Options
from quire.models.weights.gguf.folder import GGUF_SAMPLING
from quire.serving.sampling_defaults import RECOMMENDABLE

_PAGE = Path(quire.__file__).parent / "api/page/static/parameters.js"
_PARAMETERS = {each.name for each in fields(SamplingParams)}
_NO_NUMBERS = {"dry_breakers", "logit_bias", "seed", "logprobs", "times_from"}
_PENALTIES = {"presence_penalty", "frequency_penalty"}
_XTC = {"xtc_probability", "xtc_threshold"}
_DRY = {"dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"}
_RARELY_SET = {"typical_p", *_PENALTIES, *_XTC, *_DRY}
_OTHER_NAMES = {
    "dry_sequence_breakers": "dry_breakers",
    "repeat_penalty": "repetition_penalty",
}

LISTS: dict[str, tuple[Collection[str], set[str]]] = {
    "bounds": (BOUNDS.keys(), _NO_NUMBERS),
    # `logprobs` has another form in each protocol; `times_from` is the transcriptions'.
    "fields of requests": (DecodingFields.model_fields, {"logprobs", "times_from"}),
    "options in Python": (Options.__annotations__, {"times_from"}),
    # Ollama's own options, of which DRY and XTC are none.
    "options of Ollama": (
        ModelOptions.model_fields,
        {*(_NO_NUMBERS - {"seed"}), *_XTC, *_DRY},
    ),
    # What a model's makers recommend, and what a server is started with.
    "recommendations": (RECOMMENDABLE, {*_NO_NUMBERS, *_RARELY_SET}),
    "flags": (SamplingOptions.model_fields, {*_NO_NUMBERS, *_RARELY_SET}),
    "keys of GGUF": (GGUF_SAMPLING.values(), {*_NO_NUMBERS, *_RARELY_SET}),
    "inputs of the page": (
        re.findall(r'^  \["(\w+)"', _PAGE.read_text(), re.MULTILINE),
        {*(_NO_NUMBERS - {"seed"}), *_RARELY_SET},
    ),
}
"""Each list, and the parameters that it leaves out."""


@pytest.mark.parametrize("where", LISTS)
def test_a_list_has_each_sampling_parameter_but_the_named_ones(where: str) -> None:
    names, left_out = LISTS[where]
    listed = {_OTHER_NAMES.get(name, name) for name in names}
    assert _PARAMETERS - listed == left_out


def test_each_option_of_ollama_reaches_the_fields_of_requests() -> None:
    drawn = set(DecodingFields.model_fields) & _PARAMETERS
    own = {_OTHER_NAMES.get(name, name): name for name in ModelOptions.model_fields}
    named = {name: own[name] for name in drawn & own.keys()}
    decoding = ModelOptions.model_validate(dict.fromkeys(named.values(), 1)).decoding(None)
    assert {name for name in named if getattr(decoding, name) == 1} == set(named)
