"""The page for browsers: who gets it, what guards it, and that it is whole."""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import quire.api.page
from quire.core.config import ServerConfig
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Served, start

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
STATIC = Path(quire.api.page.__file__).parent / "static"
VENDOR = STATIC / "vendor"


def get(url: str, path: str = "/", **headers: str) -> httpx.Response:
    return HTTP.get(url + path, headers=headers)


def test_browsers_get_the_page_and_clients_json(shared: Served) -> None:
    page = get(shared.url, **HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>Quire</title>" in page.text
    assert get(shared.url).json()["name"] == "quire"
    assert get(shared.url, accept="application/json").json()["name"] == "quire"
    assert HTTP.head(shared.url).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/page/main.js", "/page/style.css"])
def test_nothing_runs_but_the_pages_own_files(shared: Served, path: str) -> None:
    policy = get(shared.url, path, **HTML).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == "dompurify"


def test_every_file_that_is_named_is_there(shared: Served) -> None:
    named = set()
    for file in filter(Path.is_file, STATIC.iterdir()):
        text = file.read_text()
        named |= set(re.findall(r'"/page/([\w./]+)"', text))
        named |= set(re.findall(r'(?:from|import) "\./([\w./-]+)"', text))
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert (
            not re.search(r"<script(?![^>]*src=)|\son\w+=\"|\sstyle=", text) or file.suffix == ".js"
        )
    assert {"main.js", "style.css", "docs.js"} <= named
    for name in named:
        assert get(shared.url, f"/page/{name}").status_code == 200, name


def test_the_page_can_be_installed(shared: Served) -> None:
    found = re.search('<link rel="manifest" href="([^"]+)">', get(shared.url, **HTML).text)
    assert found
    answer = get(shared.url, found[1])
    assert answer.headers["content-type"].startswith("application/manifest+json")
    assert get(shared.url, answer.json()["icons"][0]["src"]).status_code == 200


def test_a_file_that_did_not_change_is_not_sent_again(shared: Served) -> None:
    tag = get(shared.url, "/page/main.js").headers["etag"]
    again = get(shared.url, "/page/main.js", **{"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_vendored_files_are_those_that_were_pinned(shared: Served) -> None:
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    pinned = {name: digest for digest, name in (line.split("  ") for line in lines)}
    there = {path for path in VENDOR.rglob("*") if path.is_file() and path.name != "SHA256SUMS"}
    assert {path.relative_to(VENDOR).as_posix() for path in there} == set(pinned)
    for name, digest in pinned.items():
        body = (VENDOR / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == digest, name
        if Path(name).suffix in (".js", ".mjs", ".css", ".woff2"):
            assert get(shared.url, f"/page/vendor/{name}").content == body


@pytest.mark.parametrize(
    "path",
    ["/page/none.js", "/page/../files.py", "/page/%2e%2e/files.py", "/page/vendor/SHA256SUMS"],
)
def test_no_other_file_is_served(shared: Served, path: str) -> None:
    assert get(shared.url, path).status_code == 404


def test_the_page_needs_no_key_but_its_requests_do(tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(api_keys=("secret",)))
        assert get(served.url, **HTML).status_code == 200
        assert get(served.url, "/docs", **HTML).status_code == 200
        assert get(served.url).status_code == 401
        assert get(served.url, "/metrics", accept="application/json").status_code == 401
        bearer = {"authorization": "Bearer secret", "accept": "application/json"}
        assert "streams" in get(served.url, "/metrics", **bearer).json()


def test_no_page_turns_it_off(tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(page=False))
        assert get(served.url, **HTML).json()["name"] == "quire"
        assert get(served.url, "/docs", **HTML).status_code == 404
        assert get(served.url, "/page/main.js").status_code == 404


def test_metrics_as_json_equal_those_for_prometheus(shared: Served) -> None:
    get(shared.url, "/v1/models")
    text = get(shared.url, "/metrics").text
    names = set(re.findall(r"^((?:quire_|vllm:)\w+)", text, re.MULTILINE))
    view = get(shared.url, "/metrics", accept="application/json").json()["metrics"]
    assert names == set(view)
