"""What sampling parameters may be. Pure Python: the HTTP side asks before a request is queued."""

from __future__ import annotations

from quire.core.errors import RequestError
from quire.core.request import SamplingParams

MAX_LOGPROBS = 64
"""Alternatives a row may ask for; OpenAI allows 20."""

LEAST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 0.01, 10.0
"""It divides and multiplies logits in float32: far outside, every token would be worth the same."""

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("repetition_penalty", LEAST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them says nothing that argmax does not."""


def is_greedy(params: SamplingParams) -> bool:
    """Whether a row takes its likeliest token, so that randomness and filters don't matter."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuses parameters that the sampler does not define.

    Raises:
        RequestError: names the field and what it may be.
    """
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not low <= value <= high:
            raise _refused(name, f"a number from {low:g} to {high:g}", value)
    if not 0 < params.top_p <= 1:
        raise _refused("top_p", "greater than 0 and at most 1", params.top_p)
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
