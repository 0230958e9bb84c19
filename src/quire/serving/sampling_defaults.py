"""Default sampling parameters: those that the model's makers recommend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.folder import read_object
from quire.core.request import SamplingParams
from quire.core.sampling_params import BOUNDS, allowed, clamped, is_within_limits

log = logging.getLogger("quire.models")

RECOMMENDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that a model's `generation_config.json` may recommend."""


def overridden(params: SamplingParams, overrides: Mapping[str, float]) -> SamplingParams:
    """Return the parameters, with the operator's values in place of the makers'.

    Raises:
        RequestError: a value is not allowed for its parameter.
    """
    return replace(params, **clamped(overrides))


def reported(defaults: SamplingParams) -> dict[str, float]:
    """Return the defaults that clients are told: all that a model may recommend, and others that
    differ from OpenAI's because the operator set them.
    """
    names = [
        name
        for name in BOUNDS
        if name in RECOMMENDABLE or getattr(defaults, name) != getattr(SamplingParams(), name)
    ]
    return {name: getattr(defaults, name) for name in names}


def recommended(folder: Path) -> SamplingParams:
    """Return the sampling settings of a model's `generation_config.json`, with OpenAI's defaults
    for the rest.

    `do_sample: false` means greedy decoding, whatever else the file says, as in transformers. A
    value that is not allowed is ignored with a warning, because whoever serves a published model
    did not write it.

    Raises:
        ModelError: the file holds no JSON object.
    """
    file = folder / "generation_config.json"
    config = read_object(file)
    given = {name: config[name] for name in RECOMMENDABLE if config.get(name) is not None}
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    refused = {name: value for name, value in given.items() if not _is_allowed(name, value)}
    for name, value in refused.items():
        text = "%s: %s = %r is ignored, since it must be %s; OpenAI's default is used"
        log.warning(text, file, name, value, allowed(name))
    usable = {name: value for name, value in given.items() if name not in refused}
    return overridden(SamplingParams(), usable)


def _is_allowed(name: str, value: Any) -> bool:
    kinds = (int,) if BOUNDS[name].whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return is_within_limits(name, value)
