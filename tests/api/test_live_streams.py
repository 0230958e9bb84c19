"""What the live view is told of a stream."""

from __future__ import annotations

import time

from quire.api.shared.live_streams import Stream


def test_how_long_a_prompt_is_still_read() -> None:
    stream = Stream(1000, "quire-demo")
    told = time.perf_counter()
    stream.read(100, 0, "new", 60.0)
    view = stream.view(told + 20)
    assert 39.9 < view["left_s"] <= 60
    assert stream.view(told + 90)["left_s"] == 0
    stream.read(1000, 0, "new")
    assert stream.view(told + 20)["left_s"] is None
