"""A hub id, against a small hub on loopback: downloaded once, then used without the network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.tiny_models import tiny_model

REPOSITORY = "tiny/llama"
COMMIT = "0" * 39 + "1"


class _Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face hub's API that a snapshot needs."""

    folder: Path

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = urlsplit(self.path).path
        name = path.rsplit("/", 1)[1]
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            content = json.dumps([_entry(file) for file in self.folder.iterdir()]).encode()
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            files = [{"rfilename": file.name} for file in self.folder.iterdir()]
            content = json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": files}).encode()
        elif path.startswith(f"/{REPOSITORY}/resolve/") and (self.folder / name).is_file():
            content = (self.folder / name).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def _entry(file: Path) -> dict[str, object]:
    oid = hashlib.sha1(file.read_bytes()).hexdigest()
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    folder = tiny_model(tmp_path / "published", "llama")
    (folder / "README.md").write_text("not needed to run the model")
    handler = type("Hub", (_Hub,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _open(server: ThreadingHTTPServer, home: Path, name: str) -> subprocess.CompletedProcess[str]:
    """`open_model` in a process of its own: the hub's client reads its settings when imported."""
    script = f"from quire.models.loader import open_model; print(open_model({name!r}).path)"
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )


def test_downloads_once_and_then_works_offline(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    home = tmp_path / "home"

    first = _open(hub, home, REPOSITORY)
    hub.shutdown()
    hub.server_close()
    second = _open(hub, home, REPOSITORY)
    unknown = _open(hub, home, "tiny/other")

    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert second.stdout == first.stdout
    assert unknown.returncode != 0
    assert "'tiny/other' is not on this disk and the hub cannot be reached" in unknown.stderr


def test_unknown_repository_is_named(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    answer = _open(hub, tmp_path / "home", "tiny/nonesuch")
    assert answer.returncode != 0
    assert "ModelError: 'tiny/nonesuch'" in answer.stderr
