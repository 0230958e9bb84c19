"""Tokens by the second."""

from __future__ import annotations

from quire.api.shared.activity import SECONDS, Activity


def test_the_last_seconds_are_kept_and_no_more() -> None:
    now = 1000.0
    activity = Activity(lambda: now)
    activity.add(read=7)
    activity.add(written=2)
    now += 0.9
    activity.add(written=1)
    assert not any(activity.view()["written_tokens"])  # that second is not over
    now = 1003.0
    seen = activity.view()
    assert [seen["read_tokens"][-3], *seen["written_tokens"][-4:]] == [7, 0, 3, 0, 0]
    for second in range(3 * SECONDS):
        now = 1003.0 + second
        activity.add(written=1)
    assert activity.view()["written_tokens"] == [1] * SECONDS
    now += 2 * SECONDS
    assert not any(activity.view()["written_tokens"])
