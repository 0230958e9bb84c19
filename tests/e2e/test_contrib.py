"""The dashboard asks for metrics that a running server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from tests.support.child import Child
from tests.support.waiting import HANG_S

DASHBOARD = Path(__file__).parents[2] / "contrib" / "grafana.json"


def test_every_metric_of_the_dashboard_is_there(child: Child) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\bquire_\w+", target["expr"])
    }
    body = {"prompt": "Hi", "max_tokens": 3}
    assert httpx.post(f"{child.url}/v1/completions", json=body, timeout=HANG_S).status_code == 200
    known = set(re.findall(r"^(quire_\w+)", child.metrics(), re.MULTILINE))
    assert len(asked) > 10
    assert asked <= known
