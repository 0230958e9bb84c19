"""Chat completions that are stored: `store: true`, and the endpoints that list and change them.

The schema is https://platform.openai.com/docs/api-reference/chat/list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.api.shared.content import Message
from quire.api.shared.context import ServerContext
from quire.api.shared.entries import CallerEntries
from quire.api.shared.pieces import Array, Merged, compact, pieces, whole
from quire.api.shared.queries import page, read_fields, read_query
from quire.api.shared.schema import Wire
from quire.api.shared.sse import Renderer
from quire.core.errors import NotFound
from quire.core.request import FinishReason
from quire.serving.streams import ChoiceEvent
from quire.text.events import Finished, Reasoning, Text
from quire.text.output import Answer, Fold

_METADATA = "metadata["
Metadata = Annotated[dict[str, str], Field(max_length=16)]
Order = Literal["asc", "desc"]


class ChatsQuery(Wire):
    """A page of stored chat completions. `metadata[KEY]=VALUE` leaves out all others."""

    order: Order = Field("asc", description="asc: oldest first")
    limit: int = Field(20, ge=1, le=100, strict=False)
    after: str = Field("", description="the id of the completion after which the page starts")
    model: str = Field("", description="only completions of this model")


class MessagesQuery(Wire):
    """A page of the messages of a stored chat completion."""

    order: Order = Field("asc", description="asc: oldest first")
    limit: int = Field(20, ge=1, le=100, strict=False)
    after: str = Field("", description="the id of the message after which the page starts")


class ChatUpdate(Wire):
    """The metadata that a stored chat completion has from now on."""

    metadata: Metadata | None


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A stored chat completion.

    Attributes:
        body: its JSON in pieces, without metadata.
        messages: JSON of each message that it answers, without an id.
        size: bytes.
    """

    id: str
    created: int
    model: str
    body: Sequence[bytes]
    messages: Sequence[bytes]
    metadata: Mapping[str, str]
    size: int = field(init=False)
    running: ClassVar[bool] = False

    def __post_init__(self) -> None:
        parts = (*self.body, *self.messages, compact(self.metadata))
        object.__setattr__(self, "size", sum(map(len, parts)))

    def pieces(self) -> Iterator[bytes]:
        """Yield the completion's JSON."""
        yield from Merged(b"".join(self.body), {"metadata": dict(self.metadata)}).pieces()


@dataclass(frozen=True, slots=True)
class _StoredMessage:
    id: str
    written: bytes

    def pieces(self) -> Iterator[bytes]:
        yield from Merged(self.written, {"id": self.id}).pieces()


def stored_messages(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Return the JSON of messages as OpenAI's API lists them, with content parts in a separate
    field.
    """
    return tuple(compact(_listed_message(each)) for each in messages)


def _listed_message(message: Message) -> dict[str, object]:
    said: dict[str, object] = message.model_dump(by_alias=True, exclude_unset=True)
    content = said.get("content")
    parts = content if isinstance(content, list) else None
    text = None if parts is not None else content
    return {**said, "content": text, "content_parts": parts}


class KeepingChunks:
    """Renders a stream, and passes its choices' answers on when all have ended well."""

    def __init__(
        self, renderer: Renderer, choices: int, keep: Callable[[Sequence[Answer]], None]
    ) -> None:
        self._renderer = renderer
        self._folds = [Fold() for _ in range(choices)]
        self._keep = keep

    def render(self, batch: list[ChoiceEvent]) -> Iterable[bytes]:
        """Yield the chunks of a batch of events."""
        for index, event in batch:
            told = type(event)(event.text) if isinstance(event, Text | Reasoning) else event
            self._folds[index].add(told)
        return self._renderer.render(batch)

    def end(self) -> bytes:
        """Store the answers, and return the bytes that follow the last batch."""
        answers = [each.answer() for each in self._folds]
        if all(_ended_well(each) for each in answers):
            self._keep(answers)
        return self._renderer.end()


def _ended_well(answer: Answer) -> bool:
    finish = answer.finish
    return isinstance(finish, Finished) and finish.reason is not FinishReason.ABORT


class StoredChats:
    """The endpoints of stored chat completions."""

    def __init__(self, server: ServerContext, entries: CallerEntries) -> None:
        self._server = server
        self._entries = entries

    async def list(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions`."""
        wanted = _metadata(request)
        query = read_query(
            request, ChatsQuery, beside=tuple(f"{_METADATA}{key}]" for key in wanted)
        )
        found = [
            chat
            for _, chat in self._entries.of(request).all(StoredChat)
            if query.model in ("", chat.model) and wanted.items() <= chat.metadata.items()
        ]
        found.sort(key=lambda chat: chat.created, reverse=query.order == "desc")
        return await _listed(*page(found, query.after, query.limit))

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}`."""
        return await whole(self._found(request).pieces())

    async def update(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions/{id}`, which replaces the metadata."""
        fields = await read_fields(self._server, request, ChatUpdate)
        chat = replace(self._found(request), metadata=fields.metadata or {})
        self._entries.of(request).put(chat.id, chat)
        return await whole(chat.pieces())

    async def delete(self, request: Request) -> Response:
        """Answer `DELETE /v1/chat/completions/{id}`."""
        chat = self._found(request)
        self._entries.of(request).remove(chat.id, StoredChat)
        deleted = {"id": chat.id, "object": "chat.completion.deleted", "deleted": True}
        return JSONResponse(deleted)

    async def messages(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}/messages`."""
        chat, query = self._found(request), read_query(request, MessagesQuery)
        messages = [
            _StoredMessage(f"{chat.id}-{index}", each) for index, each in enumerate(chat.messages)
        ]
        ordered = messages if query.order == "asc" else messages[::-1]
        return await _listed(*page(ordered, query.after, query.limit))

    def _found(self, request: Request) -> StoredChat:
        """Return the stored chat completion that a path names."""
        chat_id = request.path_params["id"]
        chat = self._entries.of(request).get(chat_id, StoredChat)
        if chat is None:
            raise NotFound(
                f"There is no chat completion '{chat_id[:80]}' here. Completions with "
                "'store': true are kept, the most recently used (--stored-responses).",
                param="id",
                code="completion_not_found",
            )
        return chat


def _metadata(request: Request) -> dict[str, str]:
    """Return the metadata that a URL asks for."""
    return {
        name.removeprefix(_METADATA).removesuffix("]"): value
        for name, value in request.query_params.items()
        if name.startswith(_METADATA) and name.endswith("]")
    }


async def _listed(found: Sequence[StoredChat | _StoredMessage], more: bool) -> Response:
    body = {
        "object": "list",
        "data": Array(found),
        "first_id": found[0].id if found else None,
        "last_id": found[-1].id if found else None,
        "has_more": more,
    }
    return await whole(pieces(body))
