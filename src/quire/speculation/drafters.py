"""The drafters of an engine, and which of them a request allows."""

from __future__ import annotations

from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.speculation import DRAFT, HEAD, LOOKUPS, PREDICTION, Speculation
from quire.scheduler.drafts import Drafter
from quire.speculation.lookup import CachedDrafter, NGramDrafter, PredictionDrafter

_COMPUTED = {HEAD: "the model has no head", DRAFT: "the server has no draft model"}
"""Says, by the name of a drafter that needs a model, why a server has none."""


def lookup_drafters() -> list[Drafter]:
    """Return new drafters that need no model, the most reliable first."""
    return [PredictionDrafter(), CachedDrafter(), NGramDrafter()]


def allowed(request: Request, default: Speculation, drafters: frozenset[str]) -> frozenset[str]:
    """Return the names of the drafters that may draft tokens of a request.

    Args:
        default: mode of requests that choose none. A request's `prediction` is drafted in any case.
        drafters: names of the available drafters.

    Raises:
        RequestError: the request asks for a drafter that is not there.
    """
    asked = request.speculation
    if asked in _COMPUTED and asked not in drafters:
        there = ["'auto'", *(f"'{each}'" for each in ("ngram", *_COMPUTED) if each in drafters)]
        raise RequestError(
            f"speculation: {_COMPUTED[asked]} for '{asked}'; {', '.join(there)} and 'off' are "
            "possible",
            param="speculation",
            code="invalid_value",
        )
    expected = {PREDICTION} if request.prediction else set()
    match request.speculation or default:
        case "off" if request.speculation is None:
            return drafters & expected
        case "off":
            return frozenset()
        case "ngram":
            return drafters & (expected | LOOKUPS)
        case "mtp":
            return drafters & (expected | LOOKUPS | {HEAD})
        case "draft":
            return drafters & (expected | LOOKUPS | {DRAFT})
        case "auto":
            return drafters - ({PREDICTION} - expected)
