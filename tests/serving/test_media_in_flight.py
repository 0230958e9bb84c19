"""Requests in flight may hold a limited amount of media."""

from __future__ import annotations

import pytest

from quire.core.errors import Overloaded
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import FinishReason, Output
from quire.serving.media_in_flight import MediaInFlight
from quire.serving.placing import Prompt
from quire.serving.ticket import Ticket


@pytest.fixture
def flight(monkeypatch: pytest.MonkeyPatch) -> MediaInFlight:
    monkeypatch.setattr("quire.serving.media_in_flight._MAX_BYTES", 30)
    return MediaInFlight()


def prompt(size: int) -> Prompt:
    item = MediaItem.of("image", bytes(size), (1, 1), 1)
    return Prompt((1, 2), (PlacedMedia(1, item),))


def ticket() -> Ticket:
    return Ticket("a", lambda request_id, reason: None)


def end(*tickets: Ticket) -> None:
    for each in tickets:
        each.put(Output("a", finish=FinishReason.STOP))


def test_media_is_counted_until_its_last_choice_has_ended(flight: MediaInFlight) -> None:
    first, second, other = ticket(), ticket(), ticket()
    flight.hold([first, second], [prompt(10)])
    flight.hold([other], [prompt(5), prompt(5)])
    flight.check_room([prompt(10)])
    with pytest.raises(Overloaded, match="take 20 of 30 bytes") as refused:
        flight.check_room([prompt(11)])
    assert refused.value.code == "too_much_media_in_flight"
    end(first)
    with pytest.raises(Overloaded):
        flight.check_room([prompt(11)])
    end(second)
    flight.check_room([prompt(20)])


def test_alone_a_request_may_hold_more(flight: MediaInFlight) -> None:
    """A request larger than the limit is served alone; it could never be served otherwise."""
    flight.check_room([prompt(40)])
    flight.hold([ticket()], [prompt(40)])
    with pytest.raises(Overloaded):
        flight.check_room([prompt(1)])


def test_a_prompt_without_media_is_taken_at_any_time(flight: MediaInFlight) -> None:
    flight.hold([ticket()], [Prompt((1, 2))])
    flight.check_room([prompt(30)])
    flight.hold([ticket()], [prompt(40)])
    flight.check_room([Prompt((1, 2))])
