"""The simulation of many replicas: what it counts, and that its limits hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.simulate import Costs, Day, Setting, Traffic

SECONDS = 40.0


def played(setting: Setting, **changes: Any) -> Day:
    costs = replace(Costs(), **changes)
    day = Day(setting, costs, replace(Traffic(), sessions=20.0), tick_s=0.1)
    day.play(15.0, SECONDS)
    return day


def test_every_request_is_answered_or_in_flight() -> None:
    day = played(Setting(3))
    open_now = int((day.state > 1).sum())
    assert day.counts["requests"] == day.counts["finished"] + open_now
    assert len(day.waits) >= day.counts["finished"] > 0
    assert day.counts["computed"] < day.counts["prompt"]


def test_prefixes_save_what_round_robin_computes_again() -> None:
    by_prefix, by_turns = (played(Setting(4, policy)) for policy in ("prefix", "round-robin"))
    shares = [day.counts["computed"] / day.counts["prompt"] for day in (by_prefix, by_turns)]
    assert shares[0] < shares[1] / 2


def test_a_store_brings_back_what_memory_lost() -> None:
    """Memory for three sessions of twenty."""
    without, with_store = (
        played(Setting(1, store=store), kv_bytes=1e9, prompt_tokens_s=1e6)
        for store in (False, True)
    )
    assert with_store.counts["fetched"] > 0 == without.counts["fetched"]
    shares = [day.counts["computed"] / day.counts["prompt"] for day in (with_store, without)]
    assert shares[0] < shares[1] / 2


@pytest.mark.parametrize("routers", [1, 2])
def test_routers_bound_the_requests(routers: int) -> None:
    """A router that takes a second for a request, for sessions that ask more often."""
    day = played(Setting(4, routers=routers, route_s=1.0))
    assert len(day.waits) <= routers * SECONDS
    assert day.counts["requests"] > len(day.waits) + 10


def test_memory_is_never_exceeded() -> None:
    day = played(Setting(2), kv_bytes=2e9)
    costs = Costs()
    sessions = (day.cached > 0).sum()
    held = day.held_tokens() * costs.token_bytes + sessions * costs.session_bytes
    assert held <= 2 * 2e9
