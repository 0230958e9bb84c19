"""A hub id, against a small hub on loopback: downloaded once, then used without the network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from gguf.constants import GGMLQuantizationType as Type

from quire.core.errors import ModelError
from quire.models.weights.gguf.folder import choose, parts_of
from tests.support.gguf_files import Kinds, write_gguf
from tests.support.tiny_models import tiny_model
from tests.support.waiting import HANG_S

REPOSITORY, FILES = "tiny/llama", "tiny/files"
COMMIT = "0" * 39 + "1"


class _Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face hub's API that a snapshot needs."""

    folders: Mapping[str, Path]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = urlsplit(self.path).path
        name = path.rsplit("/", 1)[1]
        repository = next((each for each in self.folders if each in path), "")
        folder = self.folders.get(repository, Path())
        if path.startswith(f"/api/models/{repository}/tree/") and repository:
            content = json.dumps([_entry(file) for file in folder.iterdir()]).encode()
        elif path.startswith(f"/api/models/{repository}") and repository:
            files = [{"rfilename": file.name} for file in folder.iterdir()]
            content = json.dumps({"id": repository, "sha": COMMIT, "siblings": files}).encode()
        elif path.startswith(f"/{repository}/resolve/") and (folder / name).is_file():
            content = (folder / name).read_bytes()
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


def _files(path: Path) -> Path:
    """Return a repository of GGUF files: a model in two types, and an encoder beside them."""
    source, folder = tiny_model(path / "source", "llama"), path / "files"
    folder.mkdir()
    for word, kind in (("F32", Type.F32), ("Q8_0", Type.Q8_0)):
        write_gguf(source, folder / f"tiny-{word}.gguf", kinds=_all(kind), more={"pad": 1})
    (folder / "mmproj-tiny-F32.gguf").write_bytes(b"GGUF: an encoder of images")
    return folder


def _all(kind: Type) -> Kinds:
    return lambda name: kind


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    folder = tiny_model(tmp_path / "published", "llama")
    (folder / "README.md").write_text("not needed to run the model")
    handler = type("Hub", (_Hub,), {"folders": {REPOSITORY: folder, FILES: _files(tmp_path)}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _open(server: ThreadingHTTPServer, home: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run `open_model` in a process of its own: the hub's client reads its settings when
    imported.
    """
    script = f"from quire.models.weights.loader import open_model; print(open_model({name!r}).path)"
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)


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


def test_a_gguf_file_of_a_repository_is_downloaded_alone(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    home = tmp_path / "home"

    several = _open(hub, home, FILES)
    by_word = _open(hub, home, f"{FILES}:q8_0")
    hub.shutdown()
    hub.server_close()
    only = _open(hub, home, FILES)

    each = f"{FILES}:tiny-F32.gguf, {FILES}:tiny-Q8_0.gguf"
    assert f"holds several GGUF models; name one of {each}" in several.stderr
    assert by_word.returncode == 0, by_word.stderr
    folder = Path(by_word.stdout.strip())
    assert folder.name.startswith("tiny-Q8_0-")
    assert (folder / "tiny-Q8_0.gguf").is_file()
    assert only.returncode == 0, only.stderr
    assert by_word.stdout == only.stdout


def test_of_several_files_one_is_meant() -> None:
    names = ["README.md", "mmproj-a.gguf", "a-Q8_0-00001-of-00002.gguf"]
    names += ["a-Q8_0-00002-of-00002.gguf", "sub/a-Q4_K_M.gguf", "a-Q4_K_S.gguf"]
    assert choose(names, "q8_0", "o/r") == names[2]
    assert choose(names, "sub/a-Q4_K_M.gguf", "o/r") == "sub/a-Q4_K_M.gguf"
    assert choose([*names[:4]], None, "o/r") == names[2]
    with pytest.raises(ModelError, match=r"mmproj-a\.gguf: .*an encoder.*there are o/r:a-Q4_K_S"):
        choose(names, "mmproj-a.gguf", "o/r")
    assert parts_of(names[2]) == "a-Q8_0-*-of-00002.gguf"
    with pytest.raises(ModelError, match=r"several GGUF models; name one of o/r:a-Q4_K_S"):
        choose(names, None, "o/r")
    with pytest.raises(ModelError, match=r"no GGUF model 'Q6_K'; there are o/r:a-Q4_K_S\.gguf"):
        choose(names, "Q6_K", "o/r")
