"""OpenAI's `/v1/completions`: text or token ids in, text out, no template and no dialect.

The schema is https://platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.api.completions.logprobs import (
    CompletionLogprobs,
    Lists,
    LogprobsWriter,
    MeanLogprob,
    PromptScores,
    best_choices,
)
from quire.api.shared.context import Context, ServerContext, common_fields, until_gone
from quire.api.shared.errors import openai_body
from quire.api.shared.fold import collect
from quire.api.shared.formats import FormatFields
from quire.api.shared.headers import headers_of
from quire.api.shared.limits import check_count
from quire.api.shared.numbers import Integer
from quire.api.shared.pieces import Array, compact, pieces, quoted, whole
from quire.api.shared.prompt_fields import Prompt, prompts_of
from quire.api.shared.render import (
    ChunkEnds,
    ChunkHeads,
    Logprobs,
    NoLogprobs,
    TokenNames,
    finish_reason,
    stop_reason,
    token_names,
    usage_body,
)
from quire.api.shared.schema import GenerationFields, StreamUsage, unlimited
from quire.api.shared.sse import EventStream, run_headers
from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.core.ids import new_id
from quire.core.sampling_params import MOST_TOKENS
from quire.serving.gaps import Gaps
from quire.serving.generation import Generation, Prepared
from quire.serving.service import Service
from quire.serving.streams import ChoiceEvent, GenerationStream
from quire.text.detokenizer import Detokenizer
from quire.text.events import Event, Failed, Finished, Text
from quire.text.output import Answer

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_CHOICES = 1024


CompletionLimit = Annotated[
    Integer,
    Field(ge=0, le=MOST_TOKENS),
    unlimited(0),
    Field(description="-1 and -2: no limit; 0: only read the prompt into the prefix cache"),
]


class CompletionRequest(GenerationFields, FormatFields):
    """Every field of OpenAI's schema: honoured, refused by name, or without effect on an answer."""

    prompt: Prompt
    max_tokens: CompletionLimit | None = None
    echo: bool | None = None
    prompt_logprobs: Integer | None = Field(
        default=None,
        ge=0,
        le=20,
        description="log-probabilities of the prompt's tokens, with this many alternatives "
        "each, as in vLLM",
    )
    logprobs: Integer | None = Field(default=None, ge=0, le=20)
    best_of: Integer | None = Field(
        default=None,
        ge=1,
        le=128,
        description="choices to generate for each prompt; the 'n' with the highest mean "
        "log-probability a token are returned, best first",
    )
    suffix: str | None = Field(
        default=None,
        description="the text after the answer, if the tokenizer has fill-in-the-middle tokens",
    )

    def generation(self, context: Context, request: Request) -> Generation:
        """Return the protocol-independent generation request.

        Raises:
            RequestError: fields that contradict each other or this server's limits.
        """
        choices, ranked = self.choices(), self.choices() > (self.n or 1)
        if ranked and self.stream:
            raise RequestError(
                "'best_of' above 'n' cannot be streamed: the best choices are known at their end.",
                param="best_of",
                code="invalid_value",
            )
        prompts = self.prompts()
        check_count(len(prompts) * choices, _MAX_CHOICES, "prompt")
        logprobs = 0 if ranked and self.logprobs is None else self.logprobs
        common = common_fields(context, self, headers_of(request.scope), logprobs=logprobs)
        if self.suffix:
            gaps = Gaps(context.service.prompts, "suffix")
            prompts = tuple(gaps.prompt(each, self.suffix) for each in prompts)
            common = changed(common, stop_token_ids=common.stop_token_ids | gaps.ends)
        return changed(
            common,
            n=choices,
            prompts=prompts,
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            format=self.answer_format(request.scope),
        )

    def choices(self) -> int:
        """Return how many choices are generated for each prompt.

        Raises:
            RequestError: they are fewer than are to be returned.
        """
        wanted = self.n or 1
        generated = wanted if self.best_of is None else self.best_of
        if generated < wanted:
            raise RequestError(
                f"'best_of' is {generated}, but it must be at least 'n', which is {wanted}.",
                param="best_of",
                code="below_min_value",
            )
        return generated

    @property
    def prompt_top(self) -> int | None:
        """Number of alternatives for each prompt token; None scores no prompt."""
        echoed = self.logprobs if self.echo else None
        wanted = [each for each in (echoed, self.prompt_logprobs) if each is not None]
        return max(wanted, default=None)

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Return the prompts, as text or as token ids."""
        return prompts_of(self.prompt)


class CompletionChunks:
    """Renders a stream's chunks. The constant parts of a choice's chunks are rendered once."""

    def __init__(
        self,
        identity: Mapping[str, object],
        run: GenerationStream,
        logprobs: Sequence[LogprobsWriter],
        *,
        echoes: list[str] | None,
        usage: StreamUsage,
        token_ids: bool = False,
        scores: Sequence[PromptScores] = (),
        by_token: Sequence[Array] = (),
    ) -> None:
        self._constant = b"data: " + compact(identity)[:-1] + b',"choices":['
        self._heads = ChunkHeads(self._constant, run, b"text", token_ids=token_ids)
        self._prompts = _prompt_ids(run) if token_ids else []
        self._ends = ChunkEnds(run, usage)
        self._echoes = echoes or []
        self._logprobs = logprobs
        self._scores = scores
        self._by_token = by_token
        shows_prompt = bool(self._prompts or self._echoes or by_token)
        self._begun = [not shows_prompt] * len(run.choices)

    def render(self, batch: list[ChoiceEvent]) -> Iterator[bytes]:
        """Yield the chunks of a batch of events."""
        self._ends.update()
        for index, event in batch:
            if not self._begun[index]:
                self._begun[index] = True
                yield from self._prompt(index)
            yield self._chunk(index, event)

    def _prompt(self, index: int) -> Iterator[bytes]:
        """Yield the chunks of what a choice shows of its prompt."""
        yield self._heads.of(index) + quoted(self._echoes[index] if self._echoes else "")
        if self._prompts:
            yield b',"prompt_token_ids":' + compact(self._prompts[index])
        if self._by_token:
            yield b',"prompt_logprobs":'
            yield from self._by_token[index].pieces()
        if not self._scores:
            yield self._ends.tail
            return
        portions = self._logprobs[index].prompt(self._scores[index])
        yield self._scored(next(portions))
        for lists in portions:
            yield self._heads.of(index) + b'""' + self._scored(lists)

    def _scored(self, lists: Lists) -> bytes:
        """Return the end of a chunk with log-probabilities."""
        return b',"logprobs":' + compact(lists) + b',"finish_reason":null}' + self._ends.after

    def _chunk(self, index: int, event: Event) -> bytes:
        head = self._heads.of(index)
        match event:
            case Text(text, ()):
                return head + quoted(text) + self._ends.tail
            case Text(text, entries):
                return head + quoted(text) + self._scored(self._logprobs[index].write(entries))
            case Finished():
                reasons = {"finish_reason": finish_reason(event), "stop_reason": stop_reason(event)}
                return head + b'"","logprobs":null,' + compact(reasons)[1:] + self._ends.after
            case Failed(error):
                return b"data: " + compact(openai_body(error)) + b"\n\n"
            case _:
                return b""

    def end(self) -> bytes:
        """Return the usage, if requested, and the end mark of OpenAI's streams."""
        return self._ends.last(self._constant)


def _prompt_ids(run: GenerationStream) -> list[Sequence[int] | None]:
    """Return the token ids of each choice's prompt."""
    copies = len(run.choices) // len(run.prompts)
    return [prompt for prompt in run.prompts for _ in range(copies)]


def _choice(index: int, answer: Answer, echo: str, logprobs: Logprobs) -> dict[str, object]:
    """Return one choice of a whole answer."""
    assert isinstance(answer.finish, Finished)  # `collect` raises for the other terminal event
    return {
        "index": index,
        "text": echo + answer.text,
        "logprobs": logprobs.body(),
        "finish_reason": finish_reason(answer.finish),
        "stop_reason": stop_reason(answer.finish),
    }


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """A prepared request and the settings of its answer.

    Attributes:
        echoes: text of each choice's prompt, if answers start with it.
        kept: choices to return for each prompt; more may be generated.
        prompt_top: alternatives to report for each token of the prompts; None scores no prompt.
        prompt_logprobs: whether scores are returned as `prompt_logprobs`.
    """

    prepared: Prepared
    echoes: list[str] | None
    kept: int
    stream: bool
    usage: StreamUsage
    logprobs: bool
    numbered: bool
    prompt_top: int | None
    prompt_logprobs: bool


async def _read(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, CompletionRequest)
    prepared = await context.prepare(fields.generation(context, request))
    return _ReadRequest(
        prepared,
        echoes=_echoes(context.service, fields) if fields.echo else None,
        kept=fields.n or 1,
        stream=fields.stream is True,
        usage=fields.stream_usage(),
        logprobs=fields.logprobs is not None,
        numbered=fields.return_tokens_as_token_ids is True,
        prompt_top=fields.prompt_top,
        prompt_logprobs=fields.prompt_logprobs is not None,
    )


class Completions:
    """The endpoint of completions."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/completions`."""
        context, asked = await self._server.read(request, _read)
        service, echoes = context.service, asked.echoes
        scores = await _scores(context, request, asked)
        names = token_names(service.tokenizer, numbered=asked.numbered)
        writers = _writers(service, asked, names)
        logprobs: list[MeanLogprob] = []
        if not asked.stream:
            logprobs = await self._logprobs(request, asked, writers=writers, scores=scores)
        run = await context.start(request, asked.prepared)
        identity = {
            "id": f"cmpl-{new_id()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.answering(asked.prepared),
        }
        token_ids = asked.prepared.spec.token_ids
        by_token = [each.by_token(names) for each in scores if asked.prompt_logprobs]
        if asked.stream:
            chunks = CompletionChunks(
                identity,
                run,
                writers,
                echoes=echoes,
                usage=asked.usage,
                token_ids=token_ids,
                scores=scores if asked.logprobs and echoes is not None else (),
                by_token=by_token,
            )
            return EventStream(run, chunks)
        answers = await collect(request, run, logprobs, slots=self._server.slots)
        means = [each.mean for each in logprobs]
        chosen = best_choices(means, asked.prepared.spec.n, asked.kept)
        choices = (
            _choice(
                number,
                answers[index],
                echo=echoes[index] if echoes is not None else "",
                logprobs=logprobs[index],
            )
            for number, index in enumerate(chosen)
        )
        if token_ids:
            prompts = _prompt_ids(run)
            choices = (
                {
                    **choice,
                    "token_ids": run.choices[index].take_ids(),
                    "prompt_token_ids": prompts[index],
                }
                for choice, index in zip(choices, chosen, strict=True)
            )
        if by_token:
            choices = (
                {**choice, "prompt_logprobs": by_token[index]}
                for choice, index in zip(choices, chosen, strict=True)
            )
        body = {**identity, "choices": Array(choices), "usage": usage_body(run.usage)}
        return await whole(pieces(body), run_headers(run))

    async def _logprobs(
        self,
        request: Request,
        asked: _ReadRequest,
        writers: Sequence[LogprobsWriter],
        scores: Sequence[PromptScores],
    ) -> list[MeanLogprob]:
        """Return what collects each choice's log-probabilities, those of an echo included."""
        logprobs: list[MeanLogprob] = []
        for index, writer in enumerate(writers):
            written = CompletionLogprobs(writer) if asked.logprobs else NoLogprobs()
            logprobs.append(MeanLogprob(written))
            if isinstance(written, CompletionLogprobs) and asked.echoes is not None:
                size = await written.add_prompt(scores[index])
                self._server.slots.hold(request.scope, size)
        return logprobs


def _writers(service: Service, asked: _ReadRequest, names: TokenNames) -> list[LogprobsWriter]:
    """Return a writer of log-probabilities for each choice."""
    prepared = asked.prepared
    return [
        LogprobsWriter(
            names,
            Detokenizer(
                service.tokenizer,
                skip_special=prepared.spec.skip_special,
                after=prompt.tokens if asked.echoes is None else (),
            ),
        )
        for prompt in prepared.prompts
        for _ in range(prepared.spec.n)
    ]


async def _scores(context: Context, request: Request, asked: _ReadRequest) -> list[PromptScores]:
    """Return the scores of each choice's prompt; empty if not requested."""
    if asked.prompt_top is None:
        return []
    prepared = context.owned(request, asked.prepared)
    work = context.service.vectors.score_prompts(prepared, asked.prompt_top)
    found = await until_gone(request.receive, work)
    scored = [
        PromptScores(prompt.tokens[0], scores)
        for prompt, scores in zip(prepared.prompts, found, strict=True)
    ]
    return [each for each in scored for _ in range(prepared.spec.n)]


def _echoes(service: Service, fields: CompletionRequest) -> list[str]:
    """Return the text of each choice's prompt, to start its answer with."""
    texts = [
        prompt
        if isinstance(prompt, str)
        else service.tokenizer.decode(prompt, skip_special_tokens=True)
        for prompt in fields.prompts()
    ]
    return [text for text in texts for _ in range(fields.choices())]
