"""OpenAI's `/v1/files` and `/v1/batches`.

The schemas are https://platform.openai.com/docs/api-reference/files and its page on batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import IO, Any, Literal

from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from quire.api.batches.lines import ROUTES
from quire.api.batches.runner import BatchRunner
from quire.api.batches.store import (
    DAY_S,
    BatchRecord,
    CallerFiles,
    FileStore,
    new_id,
)
from quire.api.shared.auth import caller_of
from quire.api.shared.context import ServerContext
from quire.api.shared.forms import read_form
from quire.api.shared.numbers import Integer
from quire.api.shared.queries import page, read_fields, read_query
from quire.api.shared.schema import Wire
from quire.core.errors import NotFound, NotOffered, RequestError

_PIECE = 1 << 20
_LEAST_EXPIRY_S, _MOST_EXPIRY_S = 3600, 30 * DAY_S
"""Bounds of the time after which a file expires, in seconds: OpenAI's."""
_MOST_FILE_BYTES = 200 << 20
"""Bytes of one uploaded file: OpenAI's limit for a batch."""


class PageQuery(Wire):
    """A page of a list."""

    after: str = Field("", description="the id after which the page starts")
    limit: int = Field(20, ge=1, le=10_000, strict=False)


class FilesQuery(PageQuery):
    """A page of files."""

    limit: int = Field(10_000, ge=1, le=10_000, strict=False)
    order: Literal["asc", "desc"] = Field("desc", description="desc: newest first")
    purpose: str = ""


class OutputExpiry(Wire):
    """When the files of a batch's answers expire."""

    anchor: Literal["created_at"]
    seconds: Integer = Field(ge=_LEAST_EXPIRY_S, le=_MOST_EXPIRY_S)


class BatchRequestFields(Wire):
    """Every field of OpenAI's schema."""

    input_file_id: str
    endpoint: Literal[ROUTES]  # type: ignore[valid-type]
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    output_expires_after: OutputExpiry | None = Field(
        default=None, description="default: answers are kept until they are deleted"
    )


class Offered:
    """The files and batches of a server, or the error to raise if it offers none."""

    def __init__(self, store: FileStore | None, runner: BatchRunner | None) -> None:
        self._store = store
        self._runner = runner

    def files(self, request: Request) -> CallerFiles:
        """Return the files of the request's caller."""
        if self._store is None:
            raise NotOffered(
                "Files and batches are disabled: start the server with --files DIR.",
                code="not_offered",
            )
        files = self._store.of(caller_of(request.scope))
        files.drop_expired()
        return files

    @property
    def runner(self) -> BatchRunner:
        assert self._runner is not None, "files are enabled"
        return self._runner


class Files:
    """The endpoints of files."""

    def __init__(self, offered: Offered) -> None:
        self._offered = offered

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/files`, a form with `file` and `purpose`."""
        files = self._offered.files(request)
        form_type = request.headers.get("content-type", "")
        if not form_type.startswith("multipart/form-data"):
            raise RequestError(
                "The request must be multipart/form-data, with the file in 'file'.",
                code="invalid_type",
            )
        async with read_form(request, _MOST_FILE_BYTES, max_fields=16) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise RequestError("The form has no 'file'.", param="file")
            if purpose != "batch":
                raise RequestError(
                    "'purpose' must be 'batch': files are kept for batches only.", param="purpose"
                )
            expires_at = _expiry(form.get("expires_after[seconds]"))
            record = await asyncio.to_thread(
                files.add_file,
                _pieces(file.file),
                file.filename or "",
                purpose,
                expires_at=expires_at,
            )
        return JSONResponse(record.body())

    async def list(self, request: Request) -> Response:
        """Answer `GET /v1/files`."""
        query, files = read_query(request, FilesQuery), self._offered.files(request).files
        wanted = [each for each in files if query.purpose in ("", each.purpose)]
        ordered = wanted if query.order == "desc" else wanted[::-1]
        found, more = page(ordered, query.after, query.limit)
        return _listed([each.body() for each in found], more)

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/files/{id}`."""
        files = self._offered.files(request).files
        return JSONResponse(files.get(request.path_params["id"], "file").body())

    async def content(self, request: Request) -> Response:
        """Answer `GET /v1/files/{id}/content`."""
        files = self._offered.files(request).files
        record = files.get(request.path_params["id"], "file")
        path = files.path(record.id)
        if not path.is_file():
            raise NotFound(
                f"The contents of '{record.id}' were deleted from the server's disk; delete the "
                "file, and upload it again.",
                param="id",
                code="not_found",
            )
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Answer `DELETE /v1/files/{id}`."""
        file_id = request.path_params["id"]
        self._offered.files(request).drop_file(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


class Batches:
    """The endpoints of OpenAI's batches."""

    def __init__(self, server: ServerContext, offered: Offered) -> None:
        self._server = server
        self._offered = offered

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/batches`."""
        files = self._offered.files(request)
        fields = await read_fields(self._server, request, BatchRequestFields)
        files.files.get(fields.input_file_id, "file", param="input_file_id")
        now, expiry = int(time.time()), fields.output_expires_after
        batch = BatchRecord(
            new_id("batch_"),
            now,
            fields.endpoint,
            input_file_id=fields.input_file_id,
            expires_at=now + DAY_S,
            metadata=fields.metadata,
            output_expires_s=None if expiry is None else expiry.seconds,
        )
        files.batches.put(batch)
        self._offered.runner.run(caller_of(request.scope), batch)
        return JSONResponse(_body(batch))

    async def list(self, request: Request) -> Response:
        """Answer `GET /v1/batches`."""
        query, files = read_query(request, PageQuery), self._offered.files(request)
        own = (each for each in files.batches if each.id.startswith("batch_"))
        found, more = page(own, query.after, query.limit)
        return _listed([_body(each) for each in found], more)

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/batches/{id}`."""
        return JSONResponse(_body(self._named(request)))

    async def cancel(self, request: Request) -> Response:
        """Answer `POST /v1/batches/{id}/cancel`."""
        batch, caller = self._named(request), caller_of(request.scope)
        return JSONResponse(_body(await self._offered.runner.cancel(caller, batch.id)))

    def _named(self, request: Request) -> BatchRecord:
        return self._offered.files(request).batches.get(request.path_params["id"], "batch")


def _listed(data: list[dict[str, Any]], more: bool) -> Response:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    empty = {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": data, **empty, **ends, "has_more": more})


_TIMES = (
    *("in_progress", "finalizing", "completed", "failed"),
    *("expired", "cancelling", "cancelled"),
)


def _body(batch: BatchRecord) -> dict[str, Any]:
    """Return OpenAI's batch object."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{name}_at": batch.times.get(name) for name in _TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.succeeded,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    }


def _expiry(seconds: object) -> int | None:
    if seconds is None:
        return None
    text = str(seconds)
    known = text.isdecimal() and len(text) < 10
    if not known or not _LEAST_EXPIRY_S <= int(text) <= _MOST_EXPIRY_S:
        raise RequestError(
            f"'expires_after[seconds]' must be between {_LEAST_EXPIRY_S} and {_MOST_EXPIRY_S}.",
            param="expires_after",
        )
    return int(time.time()) + int(text)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece
