"""A limit on the media of all requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.errors import Overloaded
from quire.serving.placing import Prompt
from quire.serving.ticket import Ticket

_MAX_BYTES = 1 << 30


class MediaInFlight:
    """Counts the media features of requests in flight, which the engine keeps until they end."""

    def __init__(self) -> None:
        self._held: list[tuple[Sequence[Ticket], int]] = []
        """The tickets of a generation, and the bytes of its prompts' media."""

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """Refuse media if other requests leave no room for it.

        Raises:
            Overloaded: the limit would be exceeded. A lone request may be larger.
        """
        size = _bytes_of(prompts)
        if not size:
            return
        self._held = [each for each in self._held if not all(one.ended for one in each[0])]
        held = sum(bytes_held for _, bytes_held in self._held)
        if held and held + size > _MAX_BYTES:
            raise Overloaded(
                f"Media of requests in flight take {held:,} of {_MAX_BYTES:,} bytes: try again "
                "later.",
                param="messages",
                code="too_much_media_in_flight",
            )

    def hold(self, tickets: Sequence[Ticket], prompts: Sequence[Prompt]) -> None:
        """Count the media of prompts until the last of their tickets has ended."""
        size = _bytes_of(prompts)
        if size:
            self._held.append((tickets, size))


def _bytes_of(prompts: Sequence[Prompt]) -> int:
    return sum(len(each.item.features) for prompt in prompts for each in prompt.media)
