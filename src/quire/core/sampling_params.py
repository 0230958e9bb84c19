"""Allowed values of sampling parameters. Pure Python, so the HTTP side checks before queueing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from quire.core.errors import RequestError
from quire.core.request import SamplingParams

MAX_LOGPROBS = 64
"""Most alternatives per token that a request may ask for; OpenAI allows 20."""

MIN_REPEATS = 3
"""Fewest repeats of a token cycle that count as a loop; see `sampling.loops`."""

MOST_TOKENS = 2**31 - 1
"""The most tokens that the engine can count."""


class Limits(TypedDict):
    """The smallest and largest values of a parameter, by pydantic's names for them."""

    ge: float
    le: float


LIMITS: Mapping[str, Limits] = {
    # Logits are divided by it in float32, which holds no more.
    "temperature": {"ge": 0.0, "le": 3.4e38},
    "top_p": {"ge": 0.0, "le": 1.0},
    "top_k": {"ge": -1, "le": MOST_TOKENS},
    "min_p": {"ge": 0.0, "le": 1.0},
    "typical_p": {"ge": 0.0, "le": 1.0},
    "xtc_probability": {"ge": 0.0, "le": 1.0},
    "xtc_threshold": {"ge": 0.0, "le": 1.0},
    "dry_multiplier": {"ge": 0.0, "le": 100.0},
    "dry_base": {"ge": 1.0, "le": 100.0},
    "dry_allowed_length": {"ge": 0, "le": MOST_TOKENS},
    "dry_penalty_last_n": {"ge": -1, "le": MOST_TOKENS},
    "presence_penalty": {"ge": -2.0, "le": 2.0},
    "frequency_penalty": {"ge": -2.0, "le": 2.0},
    # It divides and multiplies logits in float32: far outside, all tokens would be worth the same.
    "repetition_penalty": {"ge": 0.01, "le": 10.0},
}
"""Bounds of sampling parameters in requests, operator defaults and a model's recommendations; see
`as_drawn`.
"""

_INTEGERS = ("top_k", "dry_allowed_length", "dry_penalty_last_n")
_LEAST_TOP_P = 1e-7
"""Smallest top_p, below the probability of the likeliest token in any vocabulary."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are treated as 0, because the result would be argmax anyway."""


def check_repeats(repeats: int) -> int:
    """Return how many repeats of a cycle end an answer, 0 for never.

    Raises:
        ValueError: the number is too small to be detected.
    """
    if repeats < MIN_REPEATS and repeats != 0:
        raise ValueError(f"must be 0 (never) or at least {MIN_REPEATS}")
    return repeats


def as_drawn(given: Mapping[str, float]) -> dict[str, Any]:
    """Return parameters within `LIMITS` as `SamplingParams` takes them.

    `top_p` 0 leaves the likeliest token, as anything that small does; `top_k` -1 keeps all tokens.
    `typical_p` 0 leaves the most typical one.
    """
    least = {"top_p": _LEAST_TOP_P, "typical_p": _LEAST_TOP_P, "top_k": 0}
    return {name: max(value, least.get(name, value)) for name, value in given.items()}


def allowed(name: str) -> str:
    """Return a description of a parameter's allowed values."""
    kind = "an integer" if name in _INTEGERS else "a number"
    return f"{kind} from {LIMITS[name]['ge']:g} to {LIMITS[name]['le']:.10g}"


def is_within_limits(name: str, value: float) -> bool:
    """Return whether a request may set a parameter to a value."""
    return LIMITS[name]["ge"] <= value <= LIMITS[name]["le"]


def is_greedy(params: SamplingParams) -> bool:
    """Return whether a row takes its likeliest token, without randomness and filters."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameter values that the sampler does not define.

    Raises:
        RequestError: a value is not allowed; the message names the field and its allowed values.
    """
    for name in LIMITS:
        value = getattr(params, name)
        if not is_within_limits(name, value):
            raise _refused(name, allowed(name), value)
    if params.top_p == 0:
        raise _refused("top_p", "greater than 0", params.top_p)
    if params.top_k < 0:
        raise _refused("top_k", "0 (off) or more", params.top_k)
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise _refused("logprobs", f"from 0 to {MAX_LOGPROBS}", params.logprobs)
    for token, bias in params.logit_bias:
        if not (type(token) is int and 0 <= token < vocab_size):
            raise _refused("logit_bias", f"for token ids from 0 to {vocab_size - 1}", token)
        if not -100 <= bias <= 100:
            raise _refused("logit_bias", "from -100 to 100", bias)


def _refused(field: str, allowed: str, value: float) -> RequestError:
    return RequestError(
        f"{field} must be {allowed}, not {value:g}.", param=field, code="invalid_value"
    )
