"""The error raised if a whole answer could not be made."""

from __future__ import annotations

from quire.core.errors import QuireError
from quire.core.request import Failure


class RunFailed(QuireError):
    """Raised if a whole answer could not be made.

    Args:
        failure: the failure event from the engine or the text side.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
