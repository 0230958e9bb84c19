"""Routes besides generation: models, health, metrics, tokenizing."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from prometheus_client.core import Metric
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import quire
from quire.api.chat.tools import ChatTool, toolbox
from quire.api.shared.access import note_ignored
from quire.api.shared.auth import EVERYONE, caller_of
from quire.api.shared.content import Message, continues_last, to_template
from quire.api.shared.context import Context, ServerContext, until_gone
from quire.api.shared.engine_metrics import engine_families
from quire.api.shared.gateway_metrics import gateway_families
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import check_headers, read_body
from quire.api.shared.pieces import compact
from quire.api.shared.schema import TokenId, Wire, parse
from quire.api.shared.thinking import template_variables
from quire.api.shared.unsupported_media import newest, without_unsupported_media
from quire.core.errors import Forbidden, RequestError
from quire.serving.generation import Generation, Thinking
from quire.serving.model import Model
from quire.serving.sampling_defaults import reported


class TokenizeRequest(Wire):
    """The body of `/tokenize`: one of `prompt`, `content` and `messages`.

    Messages go through the chat template, as in chat. `content` and its options are llama.cpp's; by
    default they add no special tokens.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[ChatTool] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None

    @property
    def text(self) -> str:
        """The text to encode if there are no messages."""
        return (self.content if self.prompt is None else self.prompt) or ""

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a text gets the tokens that start and end a prompt."""
        if self.add_special_tokens is not None:
            return self.add_special_tokens
        return self.add_special is True if self.content is not None else True


class ModelRequest(Wire):
    """A query that names a model."""

    model: str


class TemplateRequest(TokenizeRequest):
    """A conversation to render."""

    messages: list[Message] = Field(min_length=1)


class DetokenizeRequest(Wire):
    """Token ids of this model."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


async def _tokenize(context: Context, request: Request, body: bytes) -> bytes:
    """Return the rendered answer."""
    fields = context.parse(request, body, TokenizeRequest)
    context.check_model(fields.model)
    if sum(each is not None for each in (fields.prompt, fields.content, fields.messages)) != 1:
        raise RequestError(
            "Send exactly one of 'prompt', 'content' and 'messages'.",
            param="prompt",
            code="invalid_value",
        )
    tokenizer = context.service.tokenizer
    if fields.messages is not None:
        (ids,) = await context.tokens(
            _conversation(context, request, fields, messages=fields.messages)
        )
    else:
        ids = context.service.prompts.encode(
            fields.text, "prompt", add_special_tokens=fields.adds_special_tokens
        )
    tokens: list[Any] = list(ids)
    if fields.with_pieces:
        tokens = [{"id": each, "piece": tokenizer.token_text(each)} for each in ids]
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": len(ids),
        "max_model_len": context.service.info.context_length,
    }
    if fields.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(each) for each in ids]
    return compact(answer)


def _conversation(
    context: Context, request: Request, fields: TokenizeRequest, messages: list[Message]
) -> Generation:
    """Return the messages as the chat endpoint would read them."""
    context.check_messages(len(messages))
    continues = continues_last(
        messages, fields.continue_final_message, fields.add_generation_prompt
    )
    if fields.add_generation_prompt == continues:  # they say the opposite of each other
        note_ignored(request.scope, ["add_generation_prompt"])
    shaped, last = to_template(messages), newest("messages", messages)
    return Generation(
        messages=without_unsupported_media(context.service, request.scope, shaped, newest=last),
        tools=toolbox(fields.tools).templates,
        thinking=Thinking(fields.enable_thinking),
        template_kwargs=template_variables(
            context.service, request.scope, fields.chat_template_kwargs
        ),
        continue_final=continues,
        or_anew=fields.continue_final_message is None,
    )


async def _template(context: Context, request: Request, body: bytes) -> bytes:
    """Return the rendered answer: the prompt that the chat endpoint would read, as text."""
    fields = context.parse(request, body, TemplateRequest)
    context.check_model(fields.model)
    assert fields.messages is not None, "the schema asks for them"
    (ids,) = await context.tokens(_conversation(context, request, fields, messages=fields.messages))
    return compact({"prompt": context.service.tokenizer.decode(ids)})


async def _detokenize(context: Context, request: Request, body: bytes) -> bytes:
    """Return the rendered answer."""
    fields = context.parse(request, body, DetokenizeRequest)
    context.check_model(fields.model)
    context.service.prompts.check_vocabulary(fields.tokens, "tokens")
    text = context.service.tokenizer.decode(fields.tokens)
    return compact({"prompt": text, "content": text})


async def _named(context: Context, request: Request, body: bytes) -> None:
    """Check that a request names a served model."""
    context.check_model(context.parse(request, body, ModelRequest).model)


def _llama_cpp_status(model: Model) -> dict[str, Any]:
    """Return the state in llama.cpp's terms, which Open WebUI shows."""
    words = {"loaded": "loaded", "unloading": "loaded", "loading": "loading"}
    return {"value": words.get(model.state, "unloaded"), "failed": model.state == "failed"}


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class Utilities:
    """The endpoints besides generation."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._created = int(time.time())

    async def root(self, request: Request) -> Response:
        """Answer `GET /` with the server's name. Some clients send HEAD before their first
        message.
        """
        return JSONResponse({"name": "quire", "version": quire.__version__})

    async def models(self, request: Request) -> Response:
        """Answer `GET /v1/models`, in the forms of OpenAI and Anthropic."""
        caller = caller_of(request.scope)
        listed = [
            described
            for model in self._server.models
            for own in [self._described(model, caller)]
            for described in [own, *self._adapters(model, own)]
        ]
        page = {"has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        return JSONResponse({"object": "list", "data": listed, **page})

    async def model(self, request: Request) -> Response:
        """Answer `GET /v1/models/{name}`."""
        name = request.path_params["name"]
        model = self._server.models.find(name)
        described = self._described(model, caller_of(request.scope))
        adapters = {each["id"]: each for each in self._adapters(model, described)}
        return JSONResponse(adapters.get(name, described))

    async def load(self, request: Request) -> Response:
        """Answer `POST /models/load`: load a model before its first request."""
        context, _ = await self._server.read(request, _named)
        assert context.lease is not None
        return JSONResponse(self._described(context.lease.model, caller_of(request.scope)))

    async def unload(self, request: Request) -> Response:
        """Answer `POST /models/unload`: unload a model once no request uses it, or stop its
        loading.
        """
        server = self._server
        check_headers(request)
        with server.slots.bodies.reading() as counted:
            body = await read_body(request, server.config.max_body_bytes, counted)
        if caller_of(request.scope) != EVERYONE:
            raise Forbidden(
                "This server has several API keys, so a key cannot unload a model that "
                "others may use. The operator sets how long models stay loaded "
                "(--idle-unload).",
                code="not_allowed",
            )
        strict = server.config.strict_fields
        fields, _ = parse(ModelRequest, parse_json(body), strict_fields=strict)
        model = server.models.find(fields.model)
        await until_gone(request.receive, server.models.unload(model))
        return JSONResponse(self._described(model, EVERYONE))

    def _adapters(self, model: Model, described: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the adapters of a model, as vLLM lists them."""
        return [
            {**described, "id": name, "display_name": name, "root": name, "parent": model.name}
            for name in model.config.serving.adapters
        ]

    def _described(self, model: Model, caller: str) -> dict[str, Any]:
        """Return a model as OpenAI lists it. Some fields need a loaded model.

        With several API keys, each sees only its own requests.
        """
        own = caller != EVERYONE
        described: dict[str, Any] = {
            "id": model.name,
            "object": "model",
            "type": "model",
            "display_name": model.name,
            "created": self._created,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "owned_by": "quire",
            "lifecycle": "active",
            "state": model.state,
            "status": _llama_cpp_status(model),
            "pinned": model.config.pinned,
            "requests": model.held[caller] if own else model.users,
            "expires_s": None if own else model.expires_s,
            "progress": None if model.progress is None else asdict(model.progress),
            "problem": model.problem,
        }
        if (info := model.info) is not None:
            described |= {
                "context_length": info.context_length,
                "max_model_len": info.context_length,
                "trained_length": info.trained_length or info.context_length,
                "model_type": info.model_type,
                "dtype": info.dtype,
                "kv_formats": list(info.kv_formats),
                "weight_bytes": info.weight_bytes,
                "kv_bytes": info.kv_memory,
                "modalities": list(info.modalities),
            }
        if model.loaded is not None:
            sampling = model.loaded.service.sampling
            described |= {
                "modalities": list(model.loaded.service.modalities),
                "sampling_defaults": reported(sampling),
            }
        return described

    async def health(self, request: Request) -> Response:
        """Answer `GET /health`: 503 while an engine that should answer does not; other engines may
        still answer.
        """
        models = self._server.models
        failures = [model.failure for model in models if model.failure is not None]
        states = {model.name: model.state for model in models}
        if failures:
            reason = "; ".join(failures)
            return JSONResponse({"status": "failed", "reason": reason, "models": states}, 503)
        return JSONResponse({"status": "ok", "models": states})

    async def metrics(self, request: Request) -> Response:
        """Answer `GET /metrics`, for Prometheus. With several API keys, each sees its own requests
        only.

        With `Accept: application/json`: the same figures, running, finished and refused requests,
        and tokens by second.
        """
        server, caller = self._server, caller_of(request.scope)
        engines: list[Metric] = []
        if caller == EVERYONE:
            stats = await server.models.stats()
            engines = [
                *engine_families(server.models, stats, server.slots.taken),
                *gateway_families(server.models, stats),
            ]
        metrics = server.metrics.of(caller)
        headers = {"vary": "accept"}
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse(metrics.view(engines), headers=headers)
        body = metrics.render(engines)
        return Response(body, headers=headers, media_type="text/plain; version=0.0.4")

    async def tokenize(self, request: Request) -> Response:
        """Answer `POST /tokenize`."""
        return _json((await self._server.read(request, _tokenize))[1])

    async def apply_template(self, request: Request) -> Response:
        """Answer `POST /apply-template`."""
        return _json((await self._server.read(request, _template))[1])

    async def version(self, request: Request) -> Response:
        """Answer `GET /version`, in vLLM's form."""
        return JSONResponse({"version": quire.__version__})

    async def slots(self, request: Request) -> Response:
        """Answer `GET /slots`, in llama.cpp's form, for the model named by `model`, else the first:
        the caller's running streams, and an idle slot, since all share one batch.
        """
        model = self._server.models.find(request.query_params.get("model"))
        context = None if model.info is None else model.info.context_length
        streams = self._server.metrics.of(caller_of(request.scope)).streams.view()
        own = [each for each in streams if each["model"] == model.name]
        busy = [
            {
                "id_task": each["id"],
                "is_processing": True,
                "n_prompt_tokens": each["prompt_tokens"],
                "n_prompt_tokens_processed": each["read_tokens"],
                "n_prompt_tokens_cache": each["cached_tokens"],
                "next_token": [{"has_next_token": True, "n_decoded": each["generated_tokens"]}],
            }
            for each in own
        ]
        slots: list[dict[str, object]] = [*busy, {"is_processing": False}]
        return JSONResponse([{"id": n, "n_ctx": context, **each} for n, each in enumerate(slots)])

    async def ping(self, request: Request) -> Response:
        """Answer `GET /ping`: an empty answer with the status of `/health`, as SageMaker
        expects.
        """
        status = (await self.health(request)).status_code
        return Response(status_code=status, media_type="text/plain")

    async def props(self, request: Request) -> Response:
        """Answer `GET /props`, in llama.cpp's form, for the model named by `model`, else
        the first.
        """
        model = self._server.models.find(request.query_params.get("model"))
        info, loaded = model.info, model.loaded
        modalities = () if info is None else info.modalities
        return JSONResponse(
            {
                "model_alias": model.name,
                "build_info": f"quire {quire.__version__}",
                "default_generation_settings": {
                    "n_ctx": None if info is None else info.context_length
                },
                "modalities": {"vision": "image" in modalities, "audio": "audio" in modalities},
                "chat_template": "" if loaded is None else loaded.service.template.source,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Answer `POST /detokenize`."""
        return _json((await self._server.read(request, _detokenize))[1])
