"""Anthropic's `/v1/messages/batches`, over the same batches as OpenAI's.

The schema is https://docs.anthropic.com/en/api/creating-message-batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from quire.api.batches.endpoint import Offered
from quire.api.batches.runner import MOST_REQUESTS, answer_lines, unanswered
from quire.api.batches.store import DAY_S, BatchRecord, CallerFiles, new_id
from quire.api.shared.auth import caller_of
from quire.api.shared.context import ServerContext
from quire.api.shared.pieces import compact
from quire.api.shared.queries import page, read_fields, read_query
from quire.api.shared.schema import History, Wire
from quire.core.errors import RequestError

_ENDPOINT = "/v1/messages"
_PREFIX = "msgbatch_"


class BatchedMessage(History):
    """One request; `params` are those of `/v1/messages`, which are judged when it is answered."""

    custom_id: str = Field(min_length=1, max_length=64)
    params: dict[str, Any]


class MessageBatchRequest(Wire):
    """The body of a new message batch. Each field of Anthropic's schema is accepted."""

    requests: list[BatchedMessage] = Field(min_length=1, max_length=MOST_REQUESTS)


class MessageBatchesQuery(Wire):
    """A page of batches."""

    after_id: str = ""
    before_id: str = ""
    limit: int = Field(20, ge=1, le=1000, strict=False)


class MessageBatches:
    """The endpoints of Anthropic's batches."""

    def __init__(self, server: ServerContext, offered: Offered) -> None:
        self._server = server
        self._offered = offered

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/messages/batches`."""
        files = self._offered.files(request)
        fields = await read_fields(self._server, request, MessageBatchRequest)
        _check(fields.requests)
        lines = (
            compact({"custom_id": each.custom_id, "url": _ENDPOINT, "body": each.params}) + b"\n"
            for each in fields.requests
        )
        batch_id, now = new_id(_PREFIX), int(time.time())
        kept = files.add_file(lines, f"{batch_id}.jsonl", "batch")
        batch = BatchRecord(batch_id, now, _ENDPOINT, input_file_id=kept.id, expires_at=now + DAY_S)
        batch = batch.becomes("in_progress", total=len(fields.requests))
        files.batches.put(batch)
        self._offered.runner.run(caller_of(request.scope), batch)
        return JSONResponse(_body(request, batch))

    async def list(self, request: Request) -> Response:
        """Answer `GET /v1/messages/batches`."""
        query = read_query(request, MessageBatchesQuery)
        own = [b for b in self._offered.files(request).batches if b.id.startswith(_PREFIX)]
        if query.before_id:
            found, more = page(own[::-1], query.before_id, query.limit)
            found = found[::-1]
        else:
            found, more = page(own, query.after_id, query.limit)
        ends = {
            "first_id": found[0].id if found else None,
            "last_id": found[-1].id if found else None,
        }
        data = [_body(request, each) for each in found]
        return JSONResponse({"data": data, "has_more": more, **ends})

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/messages/batches/{id}`."""
        return JSONResponse(_body(request, self._named(request)))

    async def cancel(self, request: Request) -> Response:
        """Answer `POST /v1/messages/batches/{id}/cancel`."""
        batch, caller = self._named(request), caller_of(request.scope)
        return JSONResponse(_body(request, await self._offered.runner.cancel(caller, batch.id)))

    async def delete(self, request: Request) -> Response:
        """Answer `DELETE /v1/messages/batches/{id}`."""
        files, batch = self._offered.files(request), self._named(request)
        if not batch.over:
            raise RequestError(
                "The batch is still running: cancel it first.", code="batch_not_ended"
            )
        files.batches.drop(batch.id, ".answers")
        files.files.drop(batch.input_file_id, "")
        return JSONResponse({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """Answer `GET /v1/messages/batches/{id}/results`."""
        files, batch = self._offered.files(request), self._named(request)
        if not batch.over:
            raise RequestError(
                "The batch is still running: its results are available when it has ended.",
                code="batch_not_ended",
            )
        lines = (json.dumps(line).encode() + b"\n" for line in _results(files, batch))
        return StreamingResponse(lines, media_type="application/x-jsonl")

    def _named(self, request: Request) -> BatchRecord:
        return self._offered.files(request).batches.get(request.path_params["id"], "batch")


def _check(requests: list[BatchedMessage]) -> None:
    """Raise `RequestError` if a request streams, or has the `custom_id` of an earlier one."""
    first: dict[str, int] = {}
    for number, each in enumerate(requests):
        if each.params.get("stream"):
            raise RequestError(
                f"'requests[{number}].params.stream' is true, but a batch cannot stream.",
                param=f"requests[{number}].params.stream",
            )
        if first.setdefault(each.custom_id, number) != number:
            raise RequestError(
                f"'requests[{number}].custom_id' is '{each.custom_id}', as is that of "
                f"'requests[{first[each.custom_id]}]': each request needs its own.",
                param=f"requests[{number}].custom_id",
            )


def _results(files: CallerFiles, batch: BatchRecord) -> Iterator[dict[str, Any]]:
    for line in answer_lines(files, batch):
        answer = line["response"]
        good = answer["status_code"] == 200
        result = {"type": "succeeded" if good else "errored"}
        result["message" if good else "error"] = answer["body"]
        yield {"custom_id": line["custom_id"], "result": result}
    left = "canceled" if batch.status == "cancelled" else "expired"
    for custom_id in unanswered(files, batch):
        yield {"custom_id": custom_id, "result": {"type": left}}


def _body(request: Request, batch: BatchRecord) -> dict[str, Any]:
    """Return Anthropic's batch object. Requests count as processing until the batch is over."""
    processing = "canceling" if batch.status == "cancelling" else "in_progress"
    left = batch.total - batch.succeeded - batch.failed if batch.over else 0
    counts = {
        "processing": 0 if batch.over else batch.total,
        "succeeded": batch.succeeded if batch.over else 0,
        "errored": batch.failed if batch.over else 0,
        "canceled": left if batch.status == "cancelled" else 0,
        "expired": left if batch.status != "cancelled" else 0,
    }
    url = request.url.replace(path=f"{_ENDPOINT}/batches/{batch.id}/results", query="")
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if batch.over else processing,
        "request_counts": counts,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(batch.times.get(batch.status)) if batch.over else None,
        "cancel_initiated_at": _time(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": str(url) if batch.over else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
