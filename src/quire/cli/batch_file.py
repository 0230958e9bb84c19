"""Files of OpenAI's batch format: requests, and the answers that are there already.

The format is https://platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire.core.errors import QuireError

ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> list[BatchRequest]:
    """Return the requests of a file, in order; empty lines are skipped.

    Raises:
        QuireError: the file cannot be read, or a line is no request; names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError(f"{path}: {error}") from error
    found: dict[str, BatchRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _request(line, f"{path}, line {number}")
        if request.custom_id in found:
            raise QuireError(
                f"{path}, line {number}: the custom_id {request.custom_id!r} stands twice"
            )
        found[request.custom_id] = request
    return list(found.values())


def _request(line: str, where: str) -> BatchRequest:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise QuireError(f"{where}: no JSON: {error}") from error
    if not isinstance(given, dict):
        raise QuireError(f"{where}: a request is a JSON object")
    custom_id, url, body = (given.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not isinstance(body, dict):
        raise QuireError(f"{where}: a request has a custom_id, a text, and a body, an object")
    if given.get("method", "POST") != "POST" or url not in ROUTES:
        raise QuireError(f"{where}: a request POSTs to one of {', '.join(ROUTES)}")
    if body.get("stream"):
        raise QuireError(f"{where}: answers of a batch are not streamed: leave out 'stream'")
    return BatchRequest(custom_id, url, body)


class Answers:
    """The file of answers, a line each, in the order in which they come.

    Each line is one write, so a process that is killed leaves at most its last line unfinished,
    which the next one cuts off.

    Attributes:
        done: the custom_ids that were answered by an earlier run.

    Raises:
        QuireError: the file cannot be written, another process writes it, or it is of another
            format.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise QuireError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise QuireError(f"{path}: another process writes this file") from error
        self.done = self._read(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _read(self, path: Path) -> set[str]:
        self._file.seek(0)
        written = self._file.read() or b""
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):
            os.ftruncate(self._file.fileno(), len(whole))
        try:
            return {json.loads(line)["custom_id"] for line in whole.splitlines()}
        except (ValueError, KeyError, TypeError) as error:
            raise QuireError(f"{path}: holds something else than answers of a batch") from error

    def add(self, custom_id: str, status: int, request_id: str, body: Any) -> None:
        """Append the answer to a request."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
        self._file.write(json.dumps({**line, "response": response, "error": None}).encode() + b"\n")
