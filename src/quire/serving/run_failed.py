"""The error of a run that the engine or the text side ended."""

from __future__ import annotations

from quire.core.errors import QuireError
from quire.core.request import Failure


class RunFailed(QuireError):
    """A whole answer could not be made.

    Args:
        failure: what the engine or the text side says of it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
