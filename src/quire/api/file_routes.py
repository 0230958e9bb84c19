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
        path="/v1/files",
        summary="Upload a file, as a form with file and purpose",
        statuses=_STORED,
    ),
    Operation(
        lambda e: e.files.list,
        "get",
        path="/v1/files",
        summary="Files",
        statuses=(404, 501),
        query=FilesQuery,
    ),
    Operation(
        lambda e: e.files.retrieve,
        "get",
        path="/v1/files/{id}",
        summary="A file",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.files.content,
        "get",
        path="/v1/files/{id}/content",
        summary="Download a file's contents",
        answers=(),
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.files.delete,
        "delete",
        path="/v1/files/{id}",
        summary="Delete a file",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.batches.create,
        "post",
        path="/v1/batches",
        summary="Create a batch, which answers the requests of a file in the background",
        body=BatchRequestFields,
        statuses=_STORED,
    ),
    Operation(
        lambda e: e.batches.list,
        "get",
        path="/v1/batches",
        summary="Batches",
        statuses=(404, 501),
        query=PageQuery,
    ),
    Operation(
        lambda e: e.batches.retrieve,
        "get",
        path="/v1/batches/{id}",
        summary="A batch",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.batches.cancel,
        "post",
        path="/v1/batches/{id}/cancel",
        summary="Cancel a batch",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.create,
        "post",
        path="/v1/messages/batches",
        summary="Create a batch of messages, as Anthropic's API does",
        body=MessageBatchRequest,
        statuses=_STORED,
    ),
    Operation(
        lambda e: e.message_batches.list,
        "get",
        path="/v1/messages/batches",
        summary="List the batches of messages",
        statuses=(404, 501),
        query=MessageBatchesQuery,
    ),
    Operation(
        lambda e: e.message_batches.retrieve,
        "get",
        path="/v1/messages/batches/{id}",
        summary="Retrieve a batch of messages",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.cancel,
        "post",
        path="/v1/messages/batches/{id}/cancel",
        summary="Cancel a batch of messages",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.delete,
        "delete",
        path="/v1/messages/batches/{id}",
        summary="Delete a batch of messages",
        statuses=(404, 501),
    ),
    Operation(
        lambda e: e.message_batches.results,
        "get",
        path="/v1/messages/batches/{id}/results",
        summary="Download the results of a batch of messages, as JSON Lines",
        answers=(LINES,),
        statuses=(404, 501),
    ),
)
