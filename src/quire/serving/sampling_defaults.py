"""How tokens are drawn for a request that does not say: as the model's makers recommend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.core.errors import ModelError, RequestError
from quire.core.folder import read_object
from quire.core.request import SamplingParams
from quire.core.sampling_params import as_drawn, check_sampling

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What `generation_config.json` may recommend."""


def overridden(params: SamplingParams, overrides: Mapping[str, float]) -> SamplingParams:
    """The parameters with the operator's in place of theirs.

    Raises:
        RequestError: one is not what the parameter may be.
    """
    params = replace(params, **as_drawn(overrides))
    check_sampling(params, 0)
    return params


def recommended(folder: Path) -> SamplingParams:
    """What a model's `generation_config.json` recommends; OpenAI's defaults where it is silent.

    `do_sample: false` is greedy decoding, whatever else the file says, as in transformers.

    Raises:
        ModelError: a value in the file is not what the parameter may be.
    """
    file = folder / "generation_config.json"
    config = read_object(file)
    given = {name: config[name] for name in NAMES if config.get(name) is not None}
    for name, value in given.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ModelError(f"{file}: '{name}' is {value!r}, not a number")
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return overridden(SamplingParams(), given)
    except RequestError as error:
        raise ModelError(f"{file}: {error.message}") from error
