"""The endpoints of Ollama's API."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import quire
from quire.api.ollama.prompt import conversation, prompted
from quire.api.ollama.render import (
    LineRenderer,
    Lines,
    Shape,
    message_shape,
    now,
    response_shape,
    whole_answer,
)
from quire.api.ollama.schema import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    PullRequest,
    ShowRequest,
)
from quire.api.shared.context import Context, Reader, ServerContext, until_gone
from quire.api.shared.fold import collect
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import check_headers, read_body
from quire.api.shared.pieces import pieces, whole
from quire.api.shared.render import ChatLogprobs, Logprobs, NoLogprobs
from quire.api.shared.schema import parse
from quire.api.shared.sse import run_headers
from quire.api.shared.vector_fields import counted
from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.core.info import ModelInfo
from quire.serving.generation import FieldNames, Generation, Prepared
from quire.serving.model import Model
from quire.serving.vectors import embed_task, shortened

_SPOKEN = "0.13.0"
"""The version of Ollama that this API reports: VS Code's provider requires 0.6.4 or later."""
_UNKNOWN_DIGEST = "0" * 64
"""The digest of a model that was not loaded yet, whose weights were not read."""


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """A validated request and the options that its answer is formatted with.

    Attributes:
        prepared: None if the request needs no answer of the model.
    """

    prepared: Prepared | None
    stream: bool
    keep_alive: float | None = None
    logprobs: bool = False


async def _read_chat(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, ChatRequest)
    context.check_model(fields.model)
    streams = fields.stream is not False
    if not fields.messages:
        return _ReadRequest(prepared=None, stream=streams, keep_alive=fields.keep_alive)
    return _ReadRequest(
        await context.prepare(conversation(context, request, fields)),
        streams,
        logprobs=fields.logprobs is True,
    )


async def _read_generate(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, GenerateRequest)
    context.check_model(fields.model)
    streams = fields.stream is not False
    if not fields.prompt and not fields.images:
        return _ReadRequest(prepared=None, stream=streams, keep_alive=fields.keep_alive)
    return _ReadRequest(
        await context.prepare(prompted(context, request, fields)),
        streams,
        logprobs=fields.logprobs is True,
    )


@dataclass(frozen=True, slots=True)
class _ReadEmbed:
    prepared: Prepared | None
    dimensions: int | None = None


async def _read_embed(context: Context, request: Request, body: bytes) -> _ReadEmbed:
    fields = context.parse(request, body, EmbedRequest)
    texts = (fields.input,) if isinstance(fields.input, str) else tuple(fields.input)
    spec = Generation(
        truncate=None if fields.truncate is False else -1, names=FieldNames(prompt="input")
    )
    read = await _embedding(context, request, fields, spec=spec, texts=texts)
    return replace(read, dimensions=fields.dimensions or None)


async def _read_embeddings(context: Context, request: Request, body: bytes) -> _ReadEmbed:
    fields = context.parse(request, body, EmbeddingsRequest)
    spec = Generation(truncate=-1)
    return await _embedding(context, request, fields, spec=spec, texts=(fields.prompt,))


async def _embedding(
    context: Context,
    request: Request,
    fields: EmbedRequest | EmbeddingsRequest,
    *,
    spec: Generation,
    texts: Sequence[str],
) -> _ReadEmbed:
    context.check_model(fields.model)
    if not any(texts):
        return _ReadEmbed(prepared=None)
    if fields.options is not None:
        fields.options.note(request.scope)
    pooling = context.service.vectors.pooling
    spec = changed(
        spec,
        prompts=tuple(pooling.text(each, pooling.prompt(name=None)) for each in texts),
        truncate_left=False,
        vector=True,
        max_prompt=pooling.stages.max_tokens,
        keep_alive_s=fields.keep_alive,
    )
    return _ReadEmbed(await context.prepare(spec))


async def _read_pull(context: Context, request: Request, body: bytes) -> bool:
    """Return whether the answer is streamed."""
    fields = context.parse(request, body, PullRequest)
    context.check_model(fields.model or fields.name)
    return fields.stream is not False


class Ollama:
    """The endpoints of Ollama's API."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._started = datetime.now(UTC)

    async def chat(self, request: Request) -> Response:
        """Answer `POST /api/chat`."""
        return await self._answer(request, _read_chat, message_shape)

    async def generate(self, request: Request) -> Response:
        """Answer `POST /api/generate`."""
        return await self._answer(request, _read_generate, response_shape)

    async def _answer(
        self,
        request: Request,
        reader: Callable[[Context, Request, bytes], Awaitable[_ReadRequest]],
        shape: Shape,
    ) -> Response:
        context, asked = await self._server.read(request, reader)
        service = context.service
        if asked.prepared is None:
            return self._loaded(context, request, asked.keep_alive, shape=shape)
        run = await context.start(request, asked.prepared)
        if asked.stream:
            lines = LineRenderer(service.name, run, tokenizer=service.tokenizer, shape=shape)
            return Lines(run, lines, keepalive=lines.silence)
        written: Logprobs = ChatLogprobs(service.tokenizer) if asked.logprobs else NoLogprobs()
        (answer,) = await collect(request, run, [written], slots=self._server.slots)
        body = whole_answer(service.name, run, answer=answer, shape=shape)
        if asked.logprobs:
            body["logprobs"] = written.body()["content"]
        return await whole(pieces(body), run_headers(run))

    def _loaded(
        self, context: Context, request: Request, keep_alive: float | None, shape: Shape
    ) -> Response:
        """Answer a request that only loads its model or sets how long it stays loaded."""
        context.keep(request, keep_alive)
        reason = "unload" if keep_alive == 0 else "load"
        head = {"model": context.service.name, "created_at": now()}
        return JSONResponse({**head, **shape({"content": ""}), "done": True, "done_reason": reason})

    async def embed(self, request: Request) -> Response:
        """Answer `POST /api/embed`."""
        started_at = time.perf_counter()
        context, vectors, tokens = await self._vectors(request, _read_embed)
        return JSONResponse(
            {
                "model": context.service.name,
                "embeddings": vectors,
                "total_duration": round((time.perf_counter() - started_at) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": tokens,
            }
        )

    async def embeddings(self, request: Request) -> Response:
        """Answer `POST /api/embeddings`: one text, one vector."""
        _, vectors, _ = await self._vectors(request, _read_embeddings)
        return JSONResponse({"embedding": vectors[0] if vectors else []})

    async def _vectors(
        self, request: Request, reader: Reader[_ReadEmbed]
    ) -> tuple[Context, list[list[float]], int]:
        """Return the vectors of a request's texts, and their tokens."""
        context, asked = await self._server.read(request, reader)
        if asked.prepared is None:
            return context, [], 0
        vectors = context.service.vectors
        task = embed_task(vectors.pooling, kind=None, normalized=None)
        work = vectors.compute(context.owned(request, asked.prepared), task)
        found = await until_gone(request.receive, work)
        tokens = sum(each.prompt_tokens for each in found)
        counted(request, tokens, 0)
        normalized = task.normalized
        shown = [shortened(each.values, asked.dimensions, normalized=normalized) for each in found]
        return context, shown, tokens

    async def pull(self, request: Request) -> Response:
        """Answer `POST /api/pull`: load a served model, whose files are downloaded if need be."""
        context, streams = await self._server.read(request, _read_pull)
        done = {"status": "success"}
        if not streams:
            return JSONResponse(done)
        lines = ({"status": f"pulling {context.service.name}"}, done)
        content = "".join(f"{json.dumps(each)}\n" for each in lines)
        return Response(content, media_type="application/x-ndjson")

    async def tags(self, request: Request) -> Response:
        """Answer `GET /api/tags`: the served models."""
        return JSONResponse({"models": [self._listed(model) for model in self._server.models]})

    async def running(self, request: Request) -> Response:
        """Answer `GET /api/ps`: the loaded models."""
        models = [each for each in self._server.models if each.loaded is not None]
        return JSONResponse({"models": [self._running(model) for model in models]})

    async def show(self, request: Request) -> Response:
        """Answer `POST /api/show`: a model's description and capabilities."""
        server = self._server
        check_headers(request)
        with server.slots.bodies.reading() as counted_body:
            body = await read_body(request, server.config.max_body_bytes, counted_body)
        strict = server.config.strict_fields
        fields, _ = parse(ShowRequest, parse_json(body), strict_fields=strict)
        name = fields.model or fields.name
        if not name:
            raise RequestError("'model' is missing.", param="model", code="missing")
        return JSONResponse(self._shown(server.models.find(name)))

    async def version(self, request: Request) -> Response:
        """Answer `GET /api/version`: the versions of the API and of Quire."""
        return JSONResponse({"version": _SPOKEN, "quire": quire.__version__})

    def _listed(self, model: Model) -> dict[str, object]:
        info = model.info
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": self._started.isoformat(),
            "size": 0 if info is None else info.weight_bytes,
            "digest": _digest(info),
            "details": _details(info),
        }

    def _running(self, model: Model) -> dict[str, object]:
        left = model.expires_s
        until = datetime.now(UTC) + timedelta(days=36500 if left is None else left / 86400)
        info = model.info
        return {
            **self._listed(model),
            "expires_at": until.isoformat(),
            "size_vram": 0 if info is None else info.weight_bytes,
            "context_length": 0 if info is None else info.context_length,
        }

    def _shown(self, model: Model) -> dict[str, object]:
        info, loaded = model.info, model.loaded
        capabilities = ["completion"] if info is None or info.generates else []
        template = ""
        if loaded is not None:
            service = loaded.service
            template = service.template.source
            known = {"image": "vision", "audio": "audio"}
            capabilities += [known[each] for each in service.modalities if each in known]
            capabilities += ["tools"] if "tools" in service.template.variables else []
            capabilities += ["thinking"] if service.constraints.can_think else []
            capabilities += [] if service.vectors.pooling.problem else ["embedding"]
        family = "" if info is None else info.model_type
        about: dict[str, object] = {"general.architecture": family, "general.basename": model.name}
        if info is not None:
            about[f"{family}.context_length"] = info.context_length
            about[f"{family}.vocab_size"] = info.vocab_size
        return {
            "modelfile": f"FROM {model.name}\n",
            "parameters": "",
            "template": template,
            "modified_at": self._started.isoformat(),
            "details": _details(info),
            "model_info": about,
            "capabilities": capabilities,
        }


def _digest(info: ModelInfo | None) -> str:
    """Return a SHA-256 by which clients tell models apart: of the hash of the weights."""
    if info is None or not info.blocks.fingerprint:
        return _UNKNOWN_DIGEST
    return hashlib.sha256(info.blocks.fingerprint.encode()).hexdigest()


def _rounded(parameters: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 8.0B or 270M; "" for 0."""
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f}B"
    return f"{parameters / 1e6:.1f}M" if parameters else ""


def _details(info: ModelInfo | None) -> dict[str, object]:
    family = "" if info is None else info.model_type
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if info is None else _rounded(info.parameters),
        "quantization_level": "" if info is None else info.dtype,
    }
