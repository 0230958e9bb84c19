"""Routes beside generation: what is served, how it fares, text to tokens and back."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import quire
from quire.api.chat.tools import ChatTool, toolbox
from quire.api.shared.auth import EVERYONE, caller_of
from quire.api.shared.content import Message, to_template
from quire.api.shared.context import Context
from quire.api.shared.schema import TokenId, Wire
from quire.api.shared.sse import compact
from quire.api.shared.unseen import newest, without_unseen
from quire.core.errors import NotOffered, RequestError
from quire.serving.generation import Generation, Thinking
from quire.serving.sampling_defaults import NAMES


class TokenizeRequest(Wire):
    """Either `prompt` or `messages`; the latter through the chat template, as chat would."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[ChatTool] | None = None
    enable_thinking: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """Token ids of this model."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=4 << 20)]


async def _tokenize(context: Context, request: Request, body: bytes) -> bytes:
    """The rendered answer."""
    fields = context.parse(request, body, TokenizeRequest)
    context.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError(
            "Give either 'prompt' or 'messages'.", param="prompt", code="invalid_value"
        )
    tokenizer = context.service.tokenizer
    if fields.messages is not None:
        context.check_messages(len(fields.messages))
        messages, last = to_template(fields.messages), newest("messages", fields.messages)
        spec = Generation(
            messages=without_unseen(context.service, request.scope, messages, last),
            tools=toolbox(fields.tools).templates,
            thinking=Thinking(fields.enable_thinking),
        )
        (ids,) = await context.tokens(spec)
    else:
        special = fields.add_special_tokens is not False
        ids = tuple(tokenizer.encode(fields.prompt or "", add_special_tokens=special))
    answer: dict[str, Any] = {
        "tokens": list(ids),
        "count": len(ids),
        "max_model_len": context.service.info.context_length,
    }
    if fields.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(each) for each in ids]
    return compact(answer)


async def _detokenize(context: Context, request: Request, body: bytes) -> bytes:
    """The rendered answer."""
    fields = context.parse(request, body, DetokenizeRequest)
    context.check_model(fields.model)
    context.service.prompts.check_vocabulary(fields.tokens, "tokens")
    return compact({"prompt": context.service.tokenizer.decode(fields.tokens)})


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class Operation:
    """The endpoints."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._created = int(time.time())

    async def root(self, request: Request) -> Response:
        """`GET /`: who answers here. Claude Code asks with HEAD before its first message."""
        return JSONResponse({"name": "quire", "version": quire.__version__})

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`, as OpenAI and Anthropic list theirs."""
        name = self._context.service.name
        page = {"has_more": False, "first_id": name, "last_id": name}
        return JSONResponse({"object": "list", "data": [self._model()], **page})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        self._context.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        info = self._context.service.info
        return {
            "id": self._context.service.name,
            "object": "model",
            "type": "model",
            "display_name": self._context.service.name,
            "created": self._created,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "owned_by": "quire",
            "context_length": info.context_length,
            "max_model_len": info.context_length,
            "model_type": info.model_type,
            "dtype": info.dtype,
            "kv_formats": list(info.kv_formats),
            "modalities": list(self._context.service.modalities),
            "sampling_defaults": {
                name: getattr(self._context.service.sampling, name) for name in NAMES
            },
        }

    async def health(self, request: Request) -> Response:
        """`GET /health`: 503 once the engine cannot go on."""
        failure = self._context.service.client.failure
        if failure is not None:
            return JSONResponse({"status": "failed", "reason": failure}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus; one of several API keys sees its own requests only.

        As JSON for who asks for that: the same figures, and each stream of now.
        """
        context, caller = self._context, caller_of(request.scope)
        stats = await context.service.client.stats() if caller == EVERYONE else None
        metrics, in_flight = context.metrics.of(caller), context.slots.taken
        headers = {"vary": "accept"}
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse(metrics.view(stats, in_flight), headers=headers)
        body = metrics.render(stats, in_flight)
        return Response(body, headers=headers, media_type="text/plain; version=0.0.4")

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        return _json(await self._context.read(request, _tokenize))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        return _json(await self._context.read(request, _detokenize))

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings` is not offered."""
        raise NotOffered(
            "This server generates text; it serves no embedding model.", code="not_implemented"
        )
