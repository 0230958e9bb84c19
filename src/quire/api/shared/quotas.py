"""Limits of each API key: requests and tokens per minute, and its share of places and rows.

Each limit is a token bucket that holds a minute's worth. A request takes one unit; prompt tokens
and generated tokens are taken as they become known. So the bucket of tokens may fall below zero,
and the next request waits until it is full enough again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from quire.api.shared.auth import EVERYONE, callers
from quire.core.config import KeyLimits
from quire.core.errors import Overloaded
from quire.serving.streams import Observer
from quire.text.events import Failed, Finished

Clock = Callable[[], float]
MakeObserver = Callable[[str, int, str], Observer]


class Bucket:
    """The remaining amount of a limit per minute. Refills evenly.

    Args:
        per_minute: the refill per minute, and the most that it holds; None means no limit.
    """

    def __init__(self, per_minute: float | None, clock: Clock) -> None:
        self._size = per_minute
        self._clock = clock
        self._level = per_minute or 0.0
        self._seen = clock()

    def take(self, amount: float) -> None:
        """Take an amount, even below zero."""
        if self._size is not None:
            self._refill(self._size)
            self._level -= amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until so much is available; 0 if it is."""
        if self._size is None:
            return 0.0
        self._refill(self._size)
        return max(0.0, amount - self._level) * 60 / self._size

    def _refill(self, size: float) -> None:
        now = self._clock()
        self._level = min(size, self._level + (now - self._seen) * size / 60)
        self._seen = now


class Quota:
    """The limits of one API key, and what remains of them."""

    def __init__(self, limits: KeyLimits, clock: Clock) -> None:
        self.limits = limits
        self._requests = Bucket(limits.requests_per_minute, clock)
        self._tokens = Bucket(limits.tokens_per_minute, clock)

    def enter(self, tokens: int) -> None:
        """Take a request with a prompt of so many tokens.

        Raises:
            Overloaded: the key has used up one of its limits.
        """
        requests_s, tokens_s = self._requests.wait_s(1), self._tokens.wait_s(1)
        if requests_s or tokens_s:
            of_requests = requests_s >= tokens_s
            limits, what = self.limits, "requests" if of_requests else "tokens"
            limit = limits.requests_per_minute if of_requests else limits.tokens_per_minute
            raise Overloaded(
                f"This API key has used its limit of {limit} {what} a minute.",
                retry_after_s=max(requests_s, tokens_s),
                code="rate_limit_exceeded",
            )
        self._requests.take(1)
        self._tokens.take(tokens)

    def generated(self, tokens: int) -> None:
        """Take generated tokens."""
        self._tokens.take(tokens)


class Quotas:
    """The quotas of all API keys, by their callers.

    Args:
        limits: limits of the keys that have their own.
        default: limits of every other key, and of a server without keys.
    """

    def __init__(
        self,
        keys: tuple[str, ...] = (),
        limits: Mapping[str, KeyLimits] | None = None,
        default: KeyLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        default, limits = default or KeyLimits(), limits or {}
        self._of = {EVERYONE: Quota(default, clock)}
        for key, caller in zip(keys, callers(keys), strict=True):
            self._of[caller] = Quota(limits.get(key, default), clock)

    def of(self, caller: str) -> Quota:
        """Return the quota of a caller."""
        return self._of[caller]

    def observer(self, make: MakeObserver) -> MakeObserver:
        """Return a maker of observers that also take generated tokens from quotas."""

        def made(caller: str, prompt_tokens: int, model: str) -> Observer:
            observer, quota = make(caller, prompt_tokens, model), self._of.get(caller)
            if quota is None or quota.limits.tokens_per_minute is None:
                return observer
            return _Metered(observer, quota)

        return made


class _Metered:
    """An observer that charges a choice's tokens to a quota, and forwards everything to another
    observer.
    """

    def __init__(self, observer: Observer, quota: Quota) -> None:
        self._observer = observer
        self._quota = quota

    def read(self, done: int, cached: int, reuse: str | None, left_s: float | None) -> None:
        self._observer.read(done, cached, reuse, left_s=left_s)

    def first_token(self, seconds: float, cached: int, reuse: str | None) -> None:
        self._observer.first_token(seconds, cached, reuse)

    def tokens(self, seconds: float, count: int) -> None:
        self._quota.generated(count)
        self._observer.tokens(seconds, count)

    def ended(self, event: Finished | Failed) -> None:
        self._observer.ended(event)

    def gone(self) -> None:
        self._observer.gone()
