"""Converts the sampling fields of a request to the sampler's parameters."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence

from quire.api.shared.schema import DecodingFields
from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.core.request import SamplingParams
from quire.core.sampling_params import BOUNDS, clamped
from quire.serving.service import Service

_BREAKERS = ("\n", ":", '"', "*")
"""Default sequence breakers of llama.cpp and text-generation-webui."""


def sampling_of(fields: DecodingFields, service: Service, logprobs: int | None) -> SamplingParams:
    """Return sampling parameters, with the server's defaults and a random seed where absent.

    Raises:
        RequestError: a bias is for no token, or breakers are no list of texts.
    """
    named = {name: getattr(fields, name) for name in BOUNDS}
    given = {name: value for name, value in named.items() if value is not None}
    breakers: tuple[int, ...] = ()
    if fields.dry_multiplier:
        breakers = _breakers(fields.dry_sequence_breakers, service)
    return changed(
        service.sampling,
        **clamped(given),
        dry_breakers=breakers,
        logit_bias=_logit_bias(fields.logit_bias or {}, service.info.vocab_size),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed % 2**63,
        logprobs=logprobs,
    )


def _logit_bias(biases: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Return biases by token id.

    Raises:
        RequestError: a key that is not the id of a token.
    """
    pairs = []
    for key, bias in biases.items():
        known = key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary
        if not known or key != str(int(key)):
            raise RequestError(
                f"'logit_bias' has the key '{key[:40]}', which is not the id of one of this "
                f"model's {vocabulary} tokens.",
                param="logit_bias",
                code="invalid_value",
            )
        pairs.append((int(key), bias))
    return tuple(pairs)


def _breakers(given: Sequence[str] | str | None, service: Service) -> tuple[int, ...]:
    """Return the tokens that end repeats: the last token of each text when it follows a letter.

    Raises:
        RequestError: a single text, which text-generation-webui allows, does not contain JSON
            strings.
    """
    if given is None:
        given = _BREAKERS
    if isinstance(given, str):
        given = _strings(given)
    encode = service.tokenizer.encode
    encoded = (encode(f"a{text}", add_special_tokens=False) for text in given if text)
    return tuple(sorted({ids[-1] for ids in encoded if ids}))


def _strings(text: str) -> list[str]:
    listed = text.strip()
    try:
        values = json.loads(listed if listed.startswith("[") else f"[{listed}]")
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise RequestError(
            "'dry_sequence_breakers' must be a list of texts, or JSON strings separated by commas.",
            param="dry_sequence_breakers",
            code="invalid_value",
        )
    return values
