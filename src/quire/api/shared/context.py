"""The context that every endpoint gets, and the steps that every request starts with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from quire.api.shared.access import note_ignored
from quire.api.shared.auth import EVERYONE, caller_of
from quire.api.shared.field_errors import Generating
from quire.api.shared.headers import headers_of
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import Slots, check_count, check_headers, read_body
from quire.api.shared.members import members
from quire.api.shared.metrics import CallerMetrics
from quire.api.shared.model_use import use_of
from quire.api.shared.notes import Notes, note, notes
from quire.api.shared.pacing import Pace
from quire.api.shared.priority import priority_of
from quire.api.shared.quotas import Quotas
from quire.api.shared.sampling_fields import sampling_of
from quire.api.shared.schema import (
    DecodingFields,
    GenerationFields,
    Wire,
    check_stream_options,
    parse,
)
from quire.api.shared.signing import Signer
from quire.api.shared.stored import StoredConversations
from quire.core.config import ServerConfig
from quire.core.copies import changed
from quire.core.kv_choice import choose_format
from quire.core.kv_format import KVFormat
from quire.core.request import TokenRules
from quire.serving.generation import Generation, NeedsJob, Prepared
from quire.serving.job_media import JobMedia
from quire.serving.jobs import Jobs
from quire.serving.model import Lease
from quire.serving.models import Models, spellings, unknown_model
from quire.serving.service import Service
from quire.serving.streams import GenerationStream
from quire.serving.tasks import cancel_and_wait

BITS_HEADER = "x-quire-kv-bits"
SCHEME_HEADER = "x-quire-kv-scheme"
"""Request header with the KV scheme, for clients whose SDK drops unknown fields."""
SESSION_HEADER = "x-session-id"
Parsed = TypeVar("Parsed", bound=Wire)
Result = TypeVar("Result")
Reader = Callable[["Context", Request, bytes], Awaitable[Result]]
"""Reads a request and its body. A function of a module's top level, since it may run in another
process, where the request has its headers and its notes."""

_NO_PROMPT = Generation()
_ADAPTERS = "quire.adapters"
_SMALL = 16 << 10
"""Bytes of a body up to which reading it holds up no stream."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The server's state for endpoints: models, operator settings and request counters.

    Attributes:
        stored: conversations that a request may refer to. On the event loop, reading a long one
            raises `NeedsJob`.
    """

    models: Models
    config: ServerConfig
    slots: Slots
    metrics: CallerMetrics
    signer: Signer
    stored: Callable[[Request, bool], StoredConversations[Any]]
    quotas: Quotas = field(default_factory=Quotas)
    pace: Pace = field(default_factory=Pace)

    async def read(
        self,
        request: Request,
        reader: Reader[Result],
        answers: Mapping[str, Callable[..., object]] | None = None,
    ) -> tuple[Context, Result]:
        """Return the request's model, and the result of `reader` for its body and headers.

        It takes the request's slot once its body has arrived, and waits until the model is loaded.

        Args:
            answers: functions that answer questions of a reader in a job.

        Raises:
            RequestError: too large, for a model that is not served, or raised by the reader.
            EngineFailure: the model cannot be loaded.
            ClientDisconnect: the client left.
        """
        check_headers(request)
        with self.slots.bodies.reading() as counted:
            body = await read_body(request, self.config.max_body_bytes, counted)
            self.slots.enter(request.scope)
            await self.pace.turn()
            context = await self._of_model(request, body)
            return context, await context.read(request, body, reader, answers=answers)

    async def _of_model(self, request: Request, body: bytes) -> Context:
        """Return the context of the model that a request names, which the request holds from now
        on.

        A lone loaded model is not looked up: its name is checked when the body is read.
        """
        model, named = self.models.default, {}
        if len(self.models) > 1 or not model.ready:
            named = await members(body, ("model", "stream"))
            model = self.models.find(named.get("model"))
        use, caller = use_of(request.scope), caller_of(request.scope)
        if model.ready:
            lease = await use.take(self.models.use(model, caller))
        else:
            loading = until_gone(request.receive, use.take(self.models.use(model, caller)))
            lease = await use.waiting(loading, streams=named.get("stream") is True)
        note(request.scope, {"model": lease.model.name})
        loaded, serving = lease.loaded, model.config.serving
        light = loaded.jobs is not None

        def stored(request: Request) -> StoredConversations[Any]:
            return self.stored(request, light)

        media = loaded.service.prompts.media.for_job()
        return Context(
            loaded.service,
            serving,
            self.signer,
            stored=stored,
            job_media=media,
            jobs=loaded.jobs,
            lease=lease,
            quotas=self.quotas,
        )


@dataclass(frozen=True, slots=True)
class Context:
    """The model of a request, and the operator's settings for it.

    Attributes:
        stored: the conversations that a request may refer to.
        job_media: media of the request that a job has read.
        jobs: processes that read requests which are large or have media; None, as within a job,
            reads all here.
        lease: the request's hold on the model; None within a job.
        quotas: the limits of API keys.
    """

    service: Service
    config: ServerConfig
    signer: Signer
    stored: Callable[[Request], StoredConversations[Any]]
    job_media: JobMedia
    jobs: Jobs | None = None
    lease: Lease | None = None
    quotas: Quotas = field(default_factory=Quotas)

    async def start(self, request: Request, prepared: Prepared) -> GenerationStream:
        """Queue a generation for the request's caller.

        Raises:
            RequestError: it cannot be served; nothing has been queued.
            EngineFailure: the engine cannot continue.
            ClientDisconnect: the client left; compiling its grammar was stopped.
        """
        prepared = self.owned(request, prepared)
        work = self.service.constrain(self.job_media.complete(prepared))
        if self.service.constraints.bind(prepared):  # then it takes a while
            return await self.service.submit(await until_gone(request.receive, work))
        return await self.service.submit(await work)

    def owned(self, request: Request, prepared: Prepared) -> Prepared:
        """Return a prepared generation with its caller, whose prefixes are not shared with others.

        From here on the model stays loaded for as long as the request asks for.

        Raises:
            Overloaded: the caller's API key has used up one of its limits.
        """
        caller, spec = caller_of(request.scope), prepared.spec
        quota = self.quotas.of(caller)
        quota.enter(sum(len(prompt.tokens) for prompt in prepared.prompts))
        salt = spec.cache_salt if self.config.share_prefixes else caller + spec.cache_salt
        self.keep(request, spec.keep_alive_s)
        spec = changed(
            spec,
            caller=caller,
            share=quota.limits.share,
            priority=priority_of(spec.priority, headers_of(request.scope)),
            cache_salt=salt,
            session=f"{caller} {spec.session}" if spec.session else "",
        )
        return replace(prepared, spec=spec)

    def keep(self, request: Request, seconds: float | None) -> None:
        """Set how long the model stays loaded after its last request; None changes nothing.

        With several API keys the operator decides this, because it concerns all of them.
        """
        if self.lease is not None and seconds is not None:
            kept = caller_of(request.scope) == EVERYONE and self.lease.keep(seconds)
            note_ignored(request.scope, [] if kept else ["keep_alive"])

    async def read(
        self,
        request: Request,
        body: bytes,
        reader: Reader[Result],
        answers: Mapping[str, Callable[..., object]] | None = None,
    ) -> Result:
        """Run `reader` on the request's body and headers, and return its result.

        If that may take more than a few milliseconds, it runs in a job, which is killed when the
        client leaves.

        Args:
            answers: functions that answer questions of a reader in a job.

        Raises:
            RequestError: raised by the reader.
            ClientDisconnect: the client left.
        """
        if self.jobs is None or len(body) <= _SMALL:
            try:
                return await reader(self, request, body)
            except NeedsJob:
                pass
        assert self.jobs is not None, "nothing is elsewhere without jobs"
        known = self.job_media.answers | dict(answers or {})
        work = self.jobs.run(
            _read_in_job,
            reader,
            {**_job_scope(request), _ADAPTERS: self.config.adapters},
            body,
            key=caller_of(request.scope),
            answers=known,
        )
        read: tuple[Result, Notes] = await until_gone(request.receive, work)
        note(request.scope, read[1])
        return read[0]

    def parse(
        self,
        request: Request,
        body: bytes,
        schema: type[Parsed],
        decode: Callable[[bytes], object] = parse_json,
        generating: Generating | None = None,
    ) -> Parsed:
        """Return a validated body. `decode` reads its JSON; `generating` is as in `schema.parse`.

        The client is told of fields without effect.

        Raises:
            RequestError: it is not JSON, or does not match the schema.
        """
        strict = self.config.strict_fields
        fields, unknown = parse(schema, decode(body), strict_fields=strict, generating=generating)
        note_ignored(request.scope, unknown)
        return fields

    async def prepare(self, spec: Generation) -> Prepared:
        return await self.service.prepare(spec, light=self.jobs is not None)

    async def load_media(self, spec: Generation) -> Generation:
        return await self.service.prompts.load_media(spec, light=self.jobs is not None)

    async def tokens(self, spec: Generation) -> list[tuple[int, ...]]:
        return await self.service.prompts.tokens(spec, light=self.jobs is not None)

    def check_model(self, name: str | None) -> None:
        """Raise `NotFound` for another model's name; None means this model."""
        served, config = self.service.name, self.config
        known = (served, *config.also_named, *config.adapters)
        if name is not None and not any(each in known for each in spellings(name)):
            raise unknown_model(name, [served, *config.adapters])

    def adapter(self, name: str | None) -> str:
        """Return the LoRA adapter that a model name refers to; empty for none."""
        named = spellings(name or "")
        return next((each for each in named if each in self.config.adapters), "")

    def answering(self, prepared: Prepared) -> str:
        """Return the name in answers: the model's, or an adapter's."""
        return prepared.spec.adapter or self.service.name

    def kv_format(
        self, bits: float | str | None, scheme: str | None, headers: Mapping[str, str]
    ) -> KVFormat | None:
        """Return the KV format that a request asks for, by its fields or else by its headers.

        Raises:
            RequestError: the format is not offered.
        """
        return choose_format(
            self.service.info.kv_formats,
            bits if bits is not None else headers.get(BITS_HEADER),
            scheme if scheme is not None else headers.get(SCHEME_HEADER),
        )

    def check_messages(self, count: int) -> None:
        """Raise `RequestError` for more messages than the operator allows."""
        check_count(count, self.config.max_messages, "messages")


async def _read_in_job(
    context: Context, reader: Reader[Result], scope: Scope, body: bytes
) -> tuple[Result, Notes]:
    """Run the reader in a job. Return its result and the notes for the access log."""
    context = replace(context, config=replace(context.config, adapters=scope[_ADAPTERS]))
    return await reader(context, Request(scope), body), notes(scope)


def _job_scope(request: Request) -> Scope:
    """Return the parts of a request's scope that a job needs."""
    return {name: request.scope[name] for name in ("type", "method", "path", "headers")}


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`, which is cancelled if the client leaves.

    Raises:
        ClientDisconnect: the client left.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await cancel_and_wait(task, gone)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def common_fields(
    context: Context,
    fields: GenerationFields,
    headers: Mapping[str, str],
    *,
    logprobs: int | None,
) -> Generation:
    """Return a generation without its prompt, with what OpenAI's generating endpoints share.

    Raises:
        RequestError: a value is not allowed by this server's model or settings.
    """
    context.check_model(fields.model)
    check_stream_options(fields.stream_options, stream=fields.stream)
    return changed(
        decoding(context, fields, headers, logprobs=logprobs),
        n=fields.n or 1,
        stops=fields.stops(),
        token_ids=fields.return_token_ids is True,
    )


def decoding(
    context: Context,
    fields: DecodingFields,
    headers: Mapping[str, str],
    *,
    logprobs: int | None = None,
    prompt: Generation | None = None,
) -> Generation:
    """Return a generation with the fields that all endpoints share.

    Args:
        prompt: the generation whose other fields it has; None for one without a prompt yet.

    Raises:
        RequestError: a value is not allowed by this server's model or settings.
    """
    stop_ids = fields.stop_token_ids or ()
    context.service.prompts.check_vocabulary(stop_ids, "stop_token_ids")
    return changed(
        prompt or _NO_PROMPT,
        min_tokens=fields.min_tokens or 0,
        stop_on_loop=fields.stop_on_loop,
        rules=_token_rules(fields, context.service),
        include_stop=fields.include_stop_str_in_output is True,
        skip_special=fields.skip_special_tokens is not False,
        truncate=fields.truncate_prompt_tokens,
        truncate_left=None if fields.truncation_side is None else fields.truncation_side == "left",
        sampling=sampling_of(fields, context.service, logprobs),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=fields.ignore_eos is True,
        kv_format=context.kv_format(fields.kv_bits, fields.kv_scheme, headers),
        adapter=context.adapter(fields.model),
        priority=fields.priority,
        cache_salt=fields.cache_salt or "",
        keep_alive_s=fields.keep_alive,
        session=headers.get(SESSION_HEADER) or fields.session or "",
        speculation=fields.speculation,
    )


def _token_rules(fields: DecodingFields, service: Service) -> TokenRules:
    """Return the tokens that a request allows or bans.

    A banned word is banned at the start of an answer and after a blank.

    Raises:
        RequestError: a token id is outside the model's vocabulary.
    """
    allowed = tuple(fields.allowed_token_ids or ())
    service.prompts.check_vocabulary(allowed, "allowed_token_ids")
    words = [spelled for word in fields.bad_words or () for spelled in (word, f" {word.lstrip()}")]
    encoded = (tuple(service.tokenizer.encode(each, add_special_tokens=False)) for each in words)
    return TokenRules(allowed, tuple(dict.fromkeys(ids for ids in encoded if ids)))
