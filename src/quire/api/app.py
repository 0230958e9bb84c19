"""The ASGI application: routes, and the middleware in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from quire.api.adapters.endpoint import Adapters
from quire.api.audio.endpoint import Transcriptions
from quire.api.batches.endpoint import Batches, Files, Offered
from quire.api.batches.messages import MessageBatches
from quire.api.batches.runner import BatchRunner
from quire.api.batches.store import FileStore
from quire.api.chat.endpoint import Chat
from quire.api.chat.stored import StoredChats
from quire.api.completions.endpoint import Completions
from quire.api.embeddings.endpoint import Embeddings
from quire.api.infill.endpoint import Infill
from quire.api.mcp.endpoint import Mcp
from quire.api.mcp_rounds import RunsTools
from quire.api.messages.endpoint import Messages
from quire.api.ollama.endpoint import Ollama
from quire.api.openapi import OpenApi
from quire.api.operations import Endpoints
from quire.api.page import PageFiles
from quire.api.pages import ANY, PageGuard, host_names, named_origins
from quire.api.rerank.endpoint import Rerank
from quire.api.responses.conversations import Conversations
from quire.api.responses.endpoint import Responses
from quire.api.responses.store import CallerStores
from quire.api.routes import OPERATIONS
from quire.api.shared.access import IGNORED_HEADER, Access, AccessLog
from quire.api.shared.auth import ApiKeys, callers
from quire.api.shared.context import ServerContext
from quire.api.shared.entries import CallerEntries
from quire.api.shared.errors import ErrorMiddleware, handle
from quire.api.shared.kept_streams import HEADER, CallerStreams, KeepsStream
from quire.api.shared.limits import Slots, Slotted
from quire.api.shared.metrics import CallerMetrics
from quire.api.shared.model_use import HoldsModel
from quire.api.shared.quotas import Quotas
from quire.api.shared.signing import Signer
from quire.api.shared.slash import TrailingSlash
from quire.api.shared.tracing import Tracer, open_tracer
from quire.api.utilities import Utilities
from quire.core.config import ServerConfig
from quire.core.errors import QuireError
from quire.serving.mcp import McpServers
from quire.serving.models import Models

_BATCHED = 64
"""Most requests of batches that are in flight at a time."""


def build_app(models: Models, config: ServerConfig) -> Starlette:
    """Return the application that serves models. It owns the models and closes them.

    Raises:
        QuireError: tracing is configured, and its extra is not installed.
    """
    tracer, known = open_tracer(config.otlp_endpoint), callers(config.api_keys)
    slots = Slots(config.max_concurrent, config.max_body_bytes)
    entries = CallerEntries(known, config.stored_responses, config.stored_response_bytes)
    stores, metrics = CallerStores(entries), CallerMetrics(known)
    signer = Signer(config.signing_key)
    quotas = Quotas(config.api_keys, config.key_limits, config.default_limits)
    server = ServerContext(
        models,
        config,
        slots,
        metrics=metrics,
        signer=signer,
        stored=stores.reading,
        quotas=quotas,
    )
    models.observe(quotas.observer(metrics.observer))
    files, runner = _batches(config)
    offered = Offered(files, runner)
    streams = CallerStreams(known, config.keep_streams_s)
    tools = McpServers(config.mcp_servers)
    slotted = _slotted(server, streams, tools=tools, stores=stores)
    names = [name for model in models for name in model.config.names]
    endpoints = Endpoints(
        Chat(server, entries),
        StoredChats(server, entries),
        completions=Completions(server),
        infill=Infill(server),
        messages=Messages(server),
        responses=Responses(server, stores, streams),
        conversations=Conversations(server, stores),
        embeddings=Embeddings(server),
        rerank=Rerank(server),
        ollama=Ollama(server),
        utilities=Utilities(server),
        transcriptions=Transcriptions(server),
        adapters=Adapters(server),
        files=Files(offered),
        batches=Batches(server, offered),
        message_batches=MessageBatches(server, offered),
        streams=streams,
        mcp=Mcp(server, tools),
        document=OpenApi(OPERATIONS, names).get,
    )
    routes = _routes(endpoints, slotted)
    return Starlette(
        routes=routes,
        middleware=_middleware(server, routes, None if tracer is None else tracer.trace),
        exception_handlers={
            QuireError: handle,
            HTTPException: handle,
            ClientDisconnect: handle,
        },
        lifespan=_closing(models, tools, tracer=tracer, runner=runner),
    )


def _slotted(
    server: ServerContext, streams: CallerStreams, tools: McpServers, stores: CallerStores
) -> list[Middleware]:
    """Return the middleware of routes whose requests have a body, outermost first."""
    limit = server.config.max_body_bytes
    rounds = Middleware(RunsTools, servers=tools, slots=server.slots, max_body=limit, stores=stores)
    return [
        Middleware(KeepsStream, streams=streams),
        Middleware(Slotted, slots=server.slots),
        *([rounds] if server.config.mcp else []),
        Middleware(HoldsModel),
    ]


def _routes(endpoints: Endpoints, slotted: list[Middleware]) -> list[Route]:
    """Return the routes of all operations; those whose requests have a body are `slotted`."""
    return [
        Route(
            each.path,
            each.endpoint(endpoints),
            methods=[each.method],
            middleware=slotted if each.body is not None or each.form else None,
        )
        for each in OPERATIONS
    ]


def _batches(config: ServerConfig) -> tuple[FileStore | None, BatchRunner | None]:
    """Return the files and batches of the server, or None if `--files` is not set.

    Raises:
        QuireError: their folder cannot be used.
    """
    if config.files is None:
        return None, None
    store = FileStore(Path(config.files), callers(config.api_keys), config.files_bytes)
    return store, BatchRunner(store, max(1, min(_BATCHED, config.max_concurrent // 2)))


def _closing(
    models: Models, tools: McpServers, tracer: Tracer | None, runner: BatchRunner | None
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Return the lifespan, which ends all processes and sends all traces at its end."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            if runner is not None:
                runner.start(app)
            yield
            if runner is not None:
                await runner.close()
            await models.close()
        finally:
            await tools.close()
            if tracer is not None:
                await tracer.close()

    return lifespan


def _middleware(
    server: ServerContext, routes: list[Route], trace: Callable[[Access], None] | None
) -> list[Middleware]:
    """Return the middleware, outermost first: the access log sees route paths, and CORS answers
    preflights, which carry no key.
    """
    config = server.config
    named = [*routes, *PageFiles.ROUTES] if config.page else routes
    origins = named_origins(config)
    stack = [
        Middleware(TrailingSlash),
        Middleware(AccessLog, observe=server.metrics.response, routes=named, trace=trace),
        Middleware(ErrorMiddleware),
        Middleware(PageGuard, hosts=host_names(config), origins=origins),
    ]
    if origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                # Chrome asks before a public page calls this machine; `*` does not answer for it.
                allow_private_network=ANY not in origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[
                    "x-request-id",
                    "request-id",
                    "retry-after",
                    "x-should-retry",
                    "x-quire-cached-tokens",
                    "x-quire-cache-reuse",
                    IGNORED_HEADER.decode(),
                    "x-quire-unenforced",
                    HEADER,
                ],
            )
        )
    if config.page:
        stack.append(Middleware(PageFiles))
    if config.api_keys:
        stack.append(Middleware(ApiKeys, keys=config.api_keys, metrics_key=config.metrics_key))
    return stack
