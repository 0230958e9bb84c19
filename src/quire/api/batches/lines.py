"""Files of OpenAI's batch format: requests, and answers of earlier runs.

The format is https://platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
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
    """One line of the input.

    Attributes:
        body: JSON to post. It may have values that the server refuses, such as NaN.
    """

    custom_id: str
    url: str
    body: bytes


class BadLine(QuireError):
    """Raised for a line of a batch that is not a request. `line` is its number from 1; 0 means the
    whole file.
    """

    def __init__(self, where: str, line: int, what: str) -> None:
        super().__init__(f"{where}, line {line}: {what}" if line else f"{where}: {what}")
        self.line = line
        self.what = what


def requests_in(path: Path, url: str | None = None) -> Iterator[BatchRequest]:
    """Yield the requests of a file, in order; empty lines are skipped.

    Args:
        url: the route that all requests must have; None allows any.

    Raises:
        BadLine: the file cannot be read, or a line is no request; names the line.
    """
    seen: set[str] = set()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    request = _request(line, url)
                    if request.custom_id in seen:
                        raise ValueError(f"the custom_id {request.custom_id!r} is used twice")
                except ValueError as error:
                    raise BadLine(str(path), number, str(error)) from error
                seen.add(request.custom_id)
                yield request
    except OSError as error:
        raise BadLine(str(path), 0, error.strerror or str(error)) from error


def _request(line: bytes, wanted: str | None) -> BatchRequest:
    """Return the request on a line. Raise `ValueError` if it is none."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError("a request must be a JSON object")
    custom_id, url, body = (given.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not isinstance(body, dict):
        raise ValueError("a request needs 'custom_id', a string, and 'body', an object")
    if given.get("method", "POST") != "POST" or url not in ROUTES:
        raise ValueError(f"'url' must be one of these, and 'method' POST: {', '.join(ROUTES)}")
    if wanted is not None and url != wanted:
        raise ValueError(f"the batch is for {wanted}, the request for {url}")
    if body.get("stream"):
        raise ValueError("a batch cannot stream: leave out 'stream'")
    return BatchRequest(custom_id, url, json.dumps(body).encode())


class Answers:
    """The file of answers, one line each, in order of completion.

    Each line is one write, so a killed process leaves at most its last line unfinished, which the
    next run removes.

    Attributes:
        done: the HTTP status of each request that was answered by an earlier run, by custom_id.

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
            raise QuireError(f"{path}: another process is writing this file") from error
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

    def _read(self, path: Path) -> dict[str, int]:
        self._file.seek(0)
        written = self._file.read() or b""
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):
            os.ftruncate(self._file.fileno(), len(whole))
        try:
            read = (json.loads(line) for line in whole.splitlines())
            return {each["custom_id"]: each["response"]["status_code"] for each in read}
        except (ValueError, KeyError, TypeError) as error:
            raise QuireError(
                f"{path}: has lines that are not a batch's answers; choose another output file"
            ) from error

    def add(self, custom_id: str, status: int, request_id: str, body: Any) -> None:
        """Append the answer to a request.

        Raises:
            OSError: it could not be written whole; nothing of it is left in the file.
        """
        response = {"status_code": status, "request_id": request_id, "body": body}
        answer = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
        line = json.dumps({**answer, "response": response, "error": None}).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):  # the disk is full
            os.ftruncate(self._file.fileno(), before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
