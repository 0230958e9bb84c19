"""The number of replicas follows requests and KV memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.scale.autoscaling import KV_USE, wanted_replicas
from tests.scale.applications import Load, application
from tests.support.child import Child
from tests.support.waiting import wait_until


def context(requests: float, used: dict[str, float] | None) -> Any:
    """Return what Ray tells of a deployment that aims at 2 requests for each replica."""
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 2)
    metrics = None if used is None else {KV_USE: used}
    return SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, config=config)


@pytest.mark.parametrize(
    ("requests", "used", "wanted"),
    [
        (6, None, 3),  # no replica has reported yet
        (6, {"a": 0.1}, 3),
        (1, {"a": 0.7}, 1),
        (1, {"a": 1.0}, 1 / 0.7),  # one long request fills a replica: another one is started
        (2, {"a": 0.9, "b": 0.9}, 1.8 / 0.7),
        (0, {"a": 0.0, "b": 0.0}, 0),
    ],
)
def test_requests_and_memory_decide(
    requests: float, used: dict[str, float] | None, wanted: float
) -> None:
    number, state = wanted_replicas(context(requests, used))
    assert number == pytest.approx(wanted)
    assert state == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_load_starts_and_ends_replicas_without_a_lost_request(child: Child) -> None:
    """One replica, three under load, and one again while a client still asks."""
    pytest.importorskip("ray")
    scaling = {"replicas": "auto", "max_replicas": 3, "upscale_delay_s": 1, "downscale_delay_s": 2}
    with application(18733, **scaling) as running:
        assert running.replicas() == {"RUNNING": 1}
        load = Load(running.url, 8)
        try:
            wait_until(
                lambda: running.replicas() == {"RUNNING": 3}, lambda: str(running.replicas())
            )
            before = len(load.answers)
            load.stop(but=1)
            wait_until(
                lambda: running.replicas() == {"RUNNING": 1}, lambda: str(running.replicas())
            )
            assert len(load.answers) > before
        finally:
            load.stop()
    load.assert_same_as(child)
