"""Allowed values of sampling parameters. Pure Python, so the HTTP side checks before queueing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

from quire.core.errors import RequestError
from quire.core.figures import brief
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


class Bounds(NamedTuple):
    """Allowed values of a sampling parameter.

    Attributes:
        lowest, highest: what requests, the operator and a model may set.
        least: the smallest value that the sampler takes, where it is above `lowest`; `clamped`
            turns smaller values into it.
        whole: whether values are integers.
    """

    lowest: float
    highest: float
    least: float | None = None
    whole: bool = False


_LEAST_SHARE = 1e-7
"""Smallest share of a nucleus, below the probability of the likeliest token in any vocabulary."""

BOUNDS: Mapping[str, Bounds] = {
    # Logits are divided by it in float32, which holds no more.
    "temperature": Bounds(0.0, 3.4e38),
    # 0 leaves the likeliest token, as anything that small does.
    "top_p": Bounds(0.0, 1.0, least=_LEAST_SHARE),
    # -1 keeps all tokens, as 0 does.
    "top_k": Bounds(-1, MOST_TOKENS, least=0, whole=True),
    "min_p": Bounds(0.0, 1.0),
    # 0 leaves the most typical token.
    "typical_p": Bounds(0.0, 1.0, least=_LEAST_SHARE),
    "xtc_probability": Bounds(0.0, 1.0),
    "xtc_threshold": Bounds(0.0, 1.0),
    "dry_multiplier": Bounds(0.0, 100.0),
    "dry_base": Bounds(1.0, 100.0),
    "dry_allowed_length": Bounds(0, MOST_TOKENS, whole=True),
    "dry_penalty_last_n": Bounds(-1, MOST_TOKENS, whole=True),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    # It divides and multiplies logits in float32: far outside, all tokens would be worth the same.
    "repetition_penalty": Bounds(0.01, 10.0),
}
"""Bounds of sampling parameters in requests, operator defaults and a model's recommendations."""

LIMITS: Mapping[str, Limits] = {
    name: {"ge": bounds.lowest, "le": bounds.highest} for name, bounds in BOUNDS.items()
}
"""`BOUNDS`, as arguments of pydantic's `Field`."""

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


def clamped(given: Mapping[str, float]) -> dict[str, Any]:
    """Return parameters as `SamplingParams` takes them: at least `Bounds.least`.

    Raises:
        RequestError: a value is outside of what may be set.
    """
    for name, value in given.items():
        if not is_within_limits(name, value):
            raise _refused(name, allowed(name), value)
    return {name: max(value, _LEAST[name]) for name, value in given.items()}


_LEAST = {
    name: bounds.lowest if bounds.least is None else bounds.least for name, bounds in BOUNDS.items()
}
"""The smallest value of each parameter that the sampler takes."""


def allowed(name: str) -> str:
    """Return a description of the values that a request may set a parameter to."""
    return _range(name, BOUNDS[name].lowest)


def _range(name: str, lowest: float) -> str:
    kind = "an integer" if BOUNDS[name].whole else "a number"
    return f"{kind} from {lowest:g} to {brief(BOUNDS[name].highest)}"


def is_within_limits(name: str, value: float) -> bool:
    """Return whether a request may set a parameter to a value."""
    return BOUNDS[name].lowest <= value <= BOUNDS[name].highest


def is_greedy(params: SamplingParams) -> bool:
    """Return whether a row takes its likeliest token, without randomness and filters."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameter values that the sampler does not define.

    Raises:
        RequestError: a value is not allowed; the message names the field and its allowed values.
    """
    for name, bounds in BOUNDS.items():
        value, least = getattr(params, name), _LEAST[name]
        if not least <= value <= bounds.highest:
            raise _refused(name, _range(name, least), value)
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise _refused("logprobs", f"from 0 to {MAX_LOGPROBS}", params.logprobs)
    for token, bias in params.logit_bias:
        if not (type(token) is int and 0 <= token < vocab_size):
            raise _refused("logit_bias", f"for token ids from 0 to {vocab_size - 1}", token)
        if not -100 <= bias <= 100:
            raise _refused("logit_bias", "from -100 to 100", bias)


def _refused(field: str, rule: str, value: float) -> RequestError:
    return RequestError(
        f"Invalid value for '{field}': must be {rule}, not {value:g}.",
        param=field,
        code="invalid_value",
    )
