"""The OpenAPI document: true, and no input it describes breaks the server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from quire.api.app import build_app
from quire.api.openapi import OPERATIONS, document
from quire.config import ServerConfig
from quire.engine.assembly import assemble
from tests.api.conftest import Serve, Served


def test_it_lists_the_routes_that_there_are(shared: Served) -> None:
    config = ServerConfig()
    app = build_app(assemble(shared.engine, "quire-demo", config), config)
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(each.method, each.path) for each in OPERATIONS} == routes


def test_it_is_served(serve: Serve) -> None:
    assert httpx.get(f"{serve().url}/openapi.json").json() == document("quire-demo")


@pytest.mark.slow
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.answers])
def test_no_input_breaks_the_server(serve: Serve, operation: Any) -> None:
    served = serve("Hello.")
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    described = schema[operation.path][operation.method.upper()]

    answered: set[int] = set()

    @given(case=described.as_strategy())
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        answer = case.call_and_validate(
            checks=[not_a_server_error, status_code_conformance, response_schema_conformance],
            timeout=20,
        )
        answered.add(answer.status_code)

    check()
    assert 200 in answered or operation.path == "/v1/models/{name}"
