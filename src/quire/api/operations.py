"""The endpoints of a server, and the description of an API operation."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from quire.api.adapters.endpoint import Adapters
from quire.api.audio.endpoint import Transcriptions
from quire.api.batches.endpoint import (
    Batches,
    Files,
)
from quire.api.batches.messages import (
    MessageBatches,
)
from quire.api.chat.endpoint import Chat
from quire.api.chat.stored import StoredChats
from quire.api.completions.endpoint import Completions
from quire.api.embeddings.endpoint import Embeddings
from quire.api.infill.endpoint import Infill
from quire.api.mcp.endpoint import Mcp
from quire.api.messages.endpoint import Messages
from quire.api.ollama.endpoint import Ollama
from quire.api.rerank.endpoint import Rerank
from quire.api.responses.conversations import Conversations
from quire.api.responses.endpoint import Responses
from quire.api.shared.kept_streams import CallerStreams
from quire.api.shared.schema import Wire
from quire.api.utilities import Utilities

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
LINES = "application/x-ndjson"

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The endpoints of one server.

    Attributes:
        document: `GET /openapi.json`.
    """

    chat: Chat
    chats: StoredChats
    completions: Completions
    infill: Infill
    messages: Messages
    responses: Responses
    conversations: Conversations
    embeddings: Embeddings
    rerank: Rerank
    ollama: Ollama
    utilities: Utilities
    transcriptions: Transcriptions
    adapters: Adapters
    files: Files
    batches: Batches
    message_batches: MessageBatches
    streams: CallerStreams
    mcp: Mcp
    document: Endpoint


EndpointOf = Callable[[Endpoints], Endpoint]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, as OpenAPI calls it.

    Attributes:
        endpoint: the endpoint that answers.
        path: path with starlette's convertors.
        body: the model of the request's body; None if it has none. Requests with a body take a
            slot and hold a model.
        answers: media types of a successful answer.
        value: the type of a successful JSON answer, as JSON schemas name it.
        open: whether it is allowed without a key.
        statuses: error statuses in addition to those of every operation.
        query: the model of the URL's parameters; None if it has none.
        form: whether the body is a form with a file, whose requests take a slot and hold a model.
    """

    endpoint: EndpointOf
    method: str
    path: str
    summary: str
    body: type[Wire] | None = None
    answers: tuple[str, ...] = (JSON,)
    value: str = "object"
    open: bool = False
    statuses: tuple[int, ...] = ()
    query: type[Wire] | None = None
    form: bool = False

    @property
    def template(self) -> str:
        """The path in OpenAPI's form, without convertors."""
        return re.sub(r":\w+\}", "}", self.path)
