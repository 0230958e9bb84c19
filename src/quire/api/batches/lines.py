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
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire.core.errors import QuireError
from quire.core.limited_files import TEXT_BYTES, limited_lines

ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)
_ID_PREFIX = "batch_req_"
_ANSWER_START = f'{{"id": "{_ID_PREFIX}'.encode()
"""The first bytes of each line that `Answers` writes."""


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
        for number, line in enumerate(limited_lines(path, TEXT_BYTES), 1):
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

    Raises:
        QuireError: the file cannot be written, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise QuireError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise QuireError(f"{path}: another process is writing this file") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @cached_property
    def done(self) -> dict[str, int]:
        """The HTTP status of each request that an earlier run answered, by custom_id.

        The first access reads the file and removes an unfinished last line. Access it before `add`.

        Raises:
            QuireError: the file is of another format, and left as it is.
        """
        statuses: dict[str, int] = {}
        size = 0
        try:
            for line in limited_lines(self._path, TEXT_BYTES):
                if not line.endswith(b"\n") and _may_start_an_answer(line):
                    os.ftruncate(self._file.fileno(), size)
                    break
                answer = json.loads(line)
                statuses[answer["custom_id"]] = answer["response"]["status_code"]
                size += len(line)
        except (ValueError, KeyError, TypeError) as error:
            raise QuireError(
                f"{self._path}: has lines that are not a batch's answers; choose another output "
                "file"
            ) from error
        return statuses

    def add(self, custom_id: str, status: int, request_id: str, body: Any) -> None:
        """Append the answer to a request.

        Raises:
            OSError: it could not be written whole; nothing of it is left in the file.
        """
        response = {"status_code": status, "request_id": request_id, "body": body}
        answer = {"id": f"{_ID_PREFIX}{uuid.uuid4().hex}", "custom_id": custom_id}
        line = json.dumps({**answer, "response": response, "error": None}).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):  # the disk is full
            os.ftruncate(self._file.fileno(), before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)


def _may_start_an_answer(line: bytes) -> bool:
    """Return whether an unfinished line may be what `Answers.add` had written of an answer."""
    return line[: len(_ANSWER_START)] == _ANSWER_START[: len(line)]
