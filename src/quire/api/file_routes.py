"""Routes of files and batches."""

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
from quire.api.resources import Resource

_STORED, _FOUND = (404, 413, 415, 429, 501), (404, 501)
_FILES = Resource("/v1/files", "file", "the files", stored=_STORED, found=_FOUND)
_BATCHES = Resource("/v1/batches", "batch", "the batches", stored=_STORED, found=_FOUND)
_MESSAGES = Resource(
    "/v1/messages/batches",
    "batch of messages",
    "the batches of messages",
    stored=_STORED,
    found=_FOUND,
)

FILES: tuple[Operation, ...] = (
    _FILES.create(lambda e: e.files.create, "Upload a file, as a form with file and purpose"),
    _FILES.list(lambda e: e.files.list, FilesQuery),
    _FILES.retrieve(lambda e: e.files.retrieve),
    _FILES.part(lambda e: e.files.content, "content", "Download a file's contents", answers=()),
    _FILES.delete(lambda e: e.files.delete),
    _BATCHES.create(
        lambda e: e.batches.create,
        "Create a batch, which answers the requests of a file in the background",
        BatchRequestFields,
    ),
    _BATCHES.list(lambda e: e.batches.list, PageQuery),
    _BATCHES.retrieve(lambda e: e.batches.retrieve),
    _BATCHES.cancel(lambda e: e.batches.cancel),
    _MESSAGES.create(
        lambda e: e.message_batches.create,
        "Create a batch of messages, as Anthropic's API does",
        MessageBatchRequest,
    ),
    _MESSAGES.list(lambda e: e.message_batches.list, MessageBatchesQuery),
    _MESSAGES.retrieve(lambda e: e.message_batches.retrieve),
    _MESSAGES.cancel(lambda e: e.message_batches.cancel),
    _MESSAGES.delete(lambda e: e.message_batches.delete),
    _MESSAGES.part(
        lambda e: e.message_batches.results,
        "results",
        "Download the results of a batch of messages, as JSON Lines",
        answers=(LINES,),
    ),
)
