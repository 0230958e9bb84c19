"""The operations of files and batches."""

from __future__ import annotations

from quire.api.batches.endpoint import (
    BatchRequestFields,
    FilesQuery,
    PageQuery,
)
from quire.api.batches.messages import (
    MessageBatchesQuery,
    MessageBatchRequest,
)
from quire.api.operations import LINES, Operation

_STORED = (404, 413, 415, 429, 501)

FILES: tuple[Operation, ...] = (
    Operation(
        lambda e: e.files.create,
        "post",
        "/v1/files",
        "Keeps a file, sent as a form with file and purpose",
        statuses=_STORED,
    ),
    Operation(
        lambda e: e.files.list, "get", "/v1/files", "Files", statuses=(404, 501), query=FilesQuery
    ),
    Operation(lambda e: e.files.retrieve, "get", "/v1/files/{id}", "A file", statuses=(404, 501)),
    Operation(
        lambda e: e.files.content,
        "get",
        "/v1/files/{id}/content",
        "A file's contents",
        answers=(),
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.files.delete, "delete", "/v1/files/{id}", "Forgets a file", statuses=(404, 501)
    ),
    Operation(
        lambda e: e.batches.create,
        "post",
        "/v1/batches",
        "Answers the requests of a file in the background",
        BatchRequestFields,
        statuses=_STORED,
    ),
    Operation(
        lambda e: e.batches.list,
        "get",
        "/v1/batches",
        "Batches",
        statuses=(404, 501),
        query=PageQuery,
    ),
    Operation(
        lambda e: e.batches.retrieve, "get", "/v1/batches/{id}", "A batch", statuses=(404, 501)
    ),
    Operation(
        lambda e: e.batches.cancel,
        "post",
        "/v1/batches/{id}/cancel",
        "Stops a batch",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.create,
        "post",
        "/v1/messages/batches",
        "Answers messages in the background, as Anthropic's API does",
        MessageBatchRequest,
        statuses=_STORED,
    ),
    Operation(
        lambda e: e.message_batches.list,
        "get",
        "/v1/messages/batches",
        "Batches of messages",
        statuses=(404, 501),
        query=MessageBatchesQuery,
    ),
    Operation(
        lambda e: e.message_batches.retrieve,
        "get",
        "/v1/messages/batches/{id}",
        "A batch of messages",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.cancel,
        "post",
        "/v1/messages/batches/{id}/cancel",
        "Stops a batch of messages",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.delete,
        "delete",
        "/v1/messages/batches/{id}",
        "Forgets a batch of messages",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.results,
        "get",
        "/v1/messages/batches/{id}/results",
        "The answers of a batch of messages, a line each",
        answers=(LINES,),
        statuses=(404, 501),
    ),
)
