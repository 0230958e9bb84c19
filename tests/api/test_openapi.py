"""The OpenAPI document: true, and no input it describes breaks the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from quire.api.app import build_app
from quire.api.file_routes import FILES
from quire.api.openapi import document
from quire.api.operations import Operation
from quire.api.routes import OPERATIONS
from quire.core.config import ServerConfig
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, NAME, Serve, Served, start
from tests.support.server import one_model
from tests.support.waiting import HANG_S


def test_it_lists_the_routes_that_there_are(shared: Served) -> None:
    config = ServerConfig()
    app = build_app(one_model(shared.engine, NAME, config), config)
    routes = {
        (method.lower(), route.path_format)
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    listed = {
        (method, path)
        for path, methods in document(OPERATIONS, (NAME,))["paths"].items()
        for method in methods
    }
    assert routes == listed


def test_it_is_served(serve: Serve) -> None:
    assert HTTP.get(f"{serve().url}/openapi.json").json() == document(OPERATIONS, ("quire-demo",))


@pytest.fixture(scope="module")
def keeping(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server that keeps files, and lets adapters come and go."""
    folder = tmp_path_factory.mktemp("files")
    with ExitStack() as stack:
        yield start(stack, tokenizer, ServerConfig(files=str(folder), adapter_folder=str(folder)))


@cache
def described_by(url: str) -> BaseSchema:
    """Return the document of a server, read once."""
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("examples", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "operation",
    list(OPERATIONS),
    ids=lambda each: f"{each.method} {each.path}",
)
def test_no_input_breaks_the_server(
    serve: Serve, keeping: Served, operation: Operation, examples: int
) -> None:
    kept = operation in FILES or "lora_adapter" in operation.path
    served = keeping if kept else serve("Hello.")
    described = described_by(served.url)[operation.template][operation.method.upper()]
    if operation.body is None and operation.query is None:
        examples = min(examples, 2)  # there is little to vary

    answered: set[int] = set()

    @given(case=described.as_strategy())
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        answer = case.call_and_validate(
            checks=[not_a_server_error, status_code_conformance, response_schema_conformance],
            timeout=HANG_S,
        )
        answered.add(answer.status_code)

    check()
    if examples > 100 and operation.path in ("/v1/chat/completions", "/v1/messages"):
        assert 200 in answered  # the document describes what can be answered
