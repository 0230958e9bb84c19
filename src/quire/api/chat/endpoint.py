"""OpenAI's `/v1/chat/completions`: its schema, its chunks, its whole answers.

The schema is https://platform.openai.com/docs/api-reference/chat; common extensions of other
servers (`top_k`, `chat_template_kwargs`, ...) are accepted, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.api.chat.prediction import Prediction
from quire.api.chat.stored import KeepingChunks, StoredChat, stored_messages
from quire.api.chat.tools import ChatChoice, ChatTool, opening_call, toolbox, whole_call
from quire.api.shared.access import note_ignored
from quire.api.shared.content import Message, continues_last, custom_input, to_template
from quire.api.shared.context import Context, ServerContext, common_fields
from quire.api.shared.entries import CallerEntries
from quire.api.shared.errors import openai_body
from quire.api.shared.fold import collect
from quire.api.shared.formats import FormatFields
from quire.api.shared.headers import headers_of
from quire.api.shared.numbers import Integer
from quire.api.shared.pieces import Array, compact, pieces, quoted, whole
from quire.api.shared.render import (
    ChatLogprobs,
    ChunkEnds,
    ChunkHeads,
    Identity,
    Logprobs,
    NoLogprobs,
    TokenNames,
    chat_logprobs,
    finish_reason,
    stop_reason,
    token_names,
    usage_body,
)
from quire.api.shared.schema import (
    CacheOptions,
    GenerationFields,
    StreamUsage,
    TokenLimit,
    Verbosity,
    note_verbosity,
)
from quire.api.shared.sse import EventStream, run_headers
from quire.api.shared.thinking import ThinkingFields, offered, template_variables
from quire.api.shared.toolbox import Toolbox
from quire.api.shared.unsupported_media import newest, without_unsupported_media
from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.core.ids import new_id
from quire.serving.generation import Generation, Prepared
from quire.serving.streams import ChoiceEvent, GenerationStream
from quire.text.events import (
    Event,
    Failed,
    Finished,
    PromptRead,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from quire.text.output import Answer


class ChatRequest(GenerationFields, FormatFields, ThinkingFields):
    """Every field of OpenAI's schema: honoured, refused by name, or without effect on an answer."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    tools: list[ChatTool] | None = Field(default=None, max_length=1024)
    tool_choice: ChatChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity | None = None

    continue_final_message: bool | None = Field(
        default=None,
        description="continue the last message instead of answering it; default: "
        "if it is the assistant's, the model's template shows it and a format that the answer has "
        "to meet lets it begin so",
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="true starts a new answer after a last message of the assistant"
    )
    return_progress: bool | None = Field(
        default=None,
        description="with stream: report the progress of prefill, in chunks with "
        "prompt_progress as llama.cpp does, and left_ms, the estimated time left",
    )

    prompt: None = Field(default=None, description="send messages")
    input: None = Field(default=None, description="send messages")
    system: None = Field(default=None, description="use a message with the role system")
    audio: None = Field(default=None, description="only text is generated")
    functions: None = Field(default=None, description="use tools")
    function_call: None = Field(default=None, description="use tool_choice")
    web_search_options: None = None
    moderation: None = None

    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    store: bool | None = Field(
        default=None, description="keep the completion, so that it can be listed and retrieved"
    )
    service_tier: str | None = None
    safety_identifier: str | None = None
    prediction: Prediction | None = Field(
        default=None,
        description="a text that the answer is likely to repeat; it is used as a draft",
    )
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: str | None = None

    @property
    def session(self) -> str | None:
        return self.prompt_cache_key

    def generation(self, context: Context, request: Request, tools: Toolbox) -> Generation:
        """Return the protocol-independent generation request.

        Args:
            tools: the request's own.

        Raises:
            RequestError: fields that contradict each other or this server's limits.
        """
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "'top_logprobs' needs 'logprobs' to be true.",
                param="top_logprobs",
                code="invalid_value",
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        common = common_fields(context, self, headers_of(request.scope), logprobs=logprobs)
        service, scope = context.service, request.scope
        note_verbosity(scope, self.verbosity, "verbosity")
        if self.return_progress and not self.stream:
            note_ignored(scope, ["return_progress"])
        if self.add_generation_prompt == self.continues:  # they say the opposite of each other
            note_ignored(scope, ["add_generation_prompt"])
        if self.prediction is not None and self.speculation == "off":
            note_ignored(scope, ["prediction"])
        messages, last = to_template(self.messages), newest("messages", self.messages)
        return changed(
            common,
            messages=without_unsupported_media(service, scope, messages, newest=last),
            tools=tools.templates,
            strict_tools=tools.strict,
            tool_choice=tools.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            format=self.answer_format(scope),
            show_reasoning=self.shows_reasoning,
            show_progress=self.return_progress is True and self.stream is True,
            thinking=offered(service, scope, *self.wanted()),
            template_kwargs=template_variables(service, scope, self.chat_template_kwargs),
            continue_final=self.continues,
            or_anew=self.continue_final_message is None,
            prediction="" if self.prediction is None else self.prediction.text,
        )

    @property
    def continues(self) -> bool:
        """Whether the model continues the last message."""
        return continues_last(
            self.messages, self.continue_final_message, self.add_generation_prompt
        )


class ChatChunks:
    """Renders a stream's chunks. The constant parts of a choice's chunks are rendered once."""

    def __init__(
        self,
        identity: Identity,
        run: GenerationStream,
        tokenizer: TokenNames,
        tools: Toolbox,
        *,
        usage: StreamUsage,
        token_ids: bool = False,
    ) -> None:
        constant = compact({**identity, "object": "chat.completion.chunk"})[:-1]
        self._constant = b"data: " + constant + b',"choices":['
        self._heads = ChunkHeads(self._constant, run, b"delta", token_ids=token_ids)
        self._prompt = compact({"prompt_token_ids": run.prompts[0]})[1:-1] if token_ids else b""
        self._ends = ChunkEnds(run, usage)
        self._started = [False] * len(run.choices)
        self._tokenizer = tokenizer
        self._tools = tools
        self._inputs: dict[tuple[int, int], list[str]] = {}  # of custom calls that are not whole

    def render(self, batch: list[ChoiceEvent]) -> Iterator[bytes]:
        """Yield the chunks of a batch of events."""
        self._ends.update()
        for index, event in batch:
            if isinstance(event, PromptRead):
                yield self._progress(index, event)
                continue
            if not self._started[index]:
                self._started[index] = True
                yield self._opening(index)
            yield self._chunk(index, event)

    def _opening(self, index: int) -> bytes:
        """Return a choice's first chunk. The very first one has the prompt's ids, if requested."""
        chunk = self._heads.of(index) + b'{"role":"assistant","content":""}' + self._ends.tail
        if self._prompt:
            chunk = chunk.replace(b"data: {", b"data: {" + self._prompt + b",", 1)
            self._prompt = b""
        return chunk

    def _chunk(self, index: int, event: Event) -> bytes:
        match event:
            case Text(text, ()):
                delta = b'{"content":' + quoted(text) + b"}"
            case Text(text, entries):
                logprobs = {"content": chat_logprobs(self._tokenizer, entries)}
                delta = b'{"content":' + quoted(text) + b"}"
                return self._with_logprobs(index, delta, logprobs)
            case Reasoning(text, entries):
                reasoning = quoted(text)
                delta = b'{"reasoning_content":' + reasoning + b',"reasoning":' + reasoning + b"}"
                if entries:
                    shown = chat_logprobs(self._tokenizer, entries)
                    logprobs = {"content": [], "reasoning_content": shown}
                    return self._with_logprobs(index, delta, logprobs)
            case ToolCallStarted(number, call_id, name):
                call = opening_call(self._tools, call_id, name)
                if call["type"] == "custom":
                    self._inputs[index, number] = []
                delta = compact({"tool_calls": [{"index": number, **call}]})
            case ToolCallArguments(number, json) if (index, number) in self._inputs:
                self._inputs[index, number].append(json)
                return b""
            case ToolCallArguments(number, json):
                arguments = b'"function":{"arguments":' + quoted(json) + b"}}"
                delta = b'{"tool_calls":[{"index":%d,' % number + arguments + b"]}"
            case ToolCallEnded(number) if (index, number) in self._inputs:
                return self._input(index, number)
            case ToolCallEnded():
                return b""
            case Finished():
                return self._last(index, event)
            case Failed(error):
                return b"data: " + compact(openai_body(error)) + b"\n\n"
        return self._heads.of(index) + delta + self._ends.tail

    def _with_logprobs(self, index: int, delta: bytes, logprobs: Mapping[str, object]) -> bytes:
        """Return a chunk with the log-probabilities of the tokens that it brings."""
        middle = delta + b',"logprobs":' + compact(logprobs) + b',"finish_reason":null}'
        return self._heads.of(index) + middle + self._ends.after

    def _progress(self, index: int, read: PromptRead) -> bytes:
        counts = {"total": read.total, "cache": read.cached, "processed": read.done}
        left_ms = None if read.left_s is None else round(1000 * read.left_s)
        told = {**counts, "time_ms": round(1000 * read.seconds, 1), "left_ms": left_ms}
        choice = b'{"index":%d,"delta":{}' % index + self._ends.tail
        return self._constant + choice[:-3] + b',"prompt_progress":' + compact(told) + b"}\n\n"

    def _last(self, index: int, end: Finished) -> bytes:
        cut_off = [key for key in self._inputs if key[0] == index]
        return b"".join(self._input(*key) for key in cut_off) + self._closing(index, end)

    def _input(self, index: int, number: int) -> bytes:
        """Return the complete text of a custom tool's call."""
        text = custom_input("".join(self._inputs.pop((index, number))))
        delta = compact({"tool_calls": [{"index": number, "custom": {"input": text}}]})
        return self._heads.of(index) + delta + self._ends.tail

    def _closing(self, index: int, end: Finished) -> bytes:
        reasons = {"finish_reason": finish_reason(end), "stop_reason": stop_reason(end)}
        closing = b'{},"logprobs":null,' + compact(reasons)[1:]
        return self._heads.of(index) + closing + self._ends.after

    def end(self) -> bytes:
        """Return the usage, if requested, and the end mark of OpenAI's streams."""
        return self._ends.last(self._constant)


def _choice(
    index: int, answer: Answer, tools: Toolbox, logprobs: Logprobs, ids: list[int] | None
) -> dict[str, object]:
    """Return one choice of a whole answer. `ids` are its tokens, if requested."""
    assert isinstance(answer.finish, Finished)  # `collect` raises for the other terminal event
    said = [*answer.tool_calls, *filter(None, [answer.unfinished])]
    calls = [whole_call(tools, call.id, call.name, arguments=call.arguments) for call in said]
    message: dict[str, object] = {
        "role": "assistant",
        "content": answer.text or (None if calls else ""),
        "refusal": None,
    }
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs.body(),
        "finish_reason": finish_reason(answer.finish),
        "stop_reason": stop_reason(answer.finish),
        **({} if ids is None else {"token_ids": ids}),
    }


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """A prepared request and the settings of its answer.

    Attributes:
        stored: JSON of each of its messages, if it asks for the completion to be kept.
    """

    prepared: Prepared
    tools: Toolbox
    stream: bool
    usage: StreamUsage
    logprobs: bool
    numbered: bool
    metadata: Mapping[str, str]
    stored: Sequence[bytes] | None


async def _read(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, ChatRequest)
    context.check_messages(len(fields.messages))
    tools = toolbox(fields.tools, fields.tool_choice)
    note_ignored(request.scope, tools.left_out)
    return _ReadRequest(
        await context.prepare(fields.generation(context, request, tools)),
        replace(tools, templates=()) if tools.templates else tools,
        stream=fields.stream is True,
        usage=fields.stream_usage(),
        logprobs=fields.logprobs is True,
        numbered=fields.return_tokens_as_token_ids is True,
        metadata=fields.metadata or {},
        stored=stored_messages(fields.messages) if fields.store else None,
    )


def _completion(
    identity: Identity,
    run: GenerationStream,
    choices: Iterable[dict[str, object]],
    *,
    token_ids: bool = False,
) -> dict[str, object]:
    """Return a whole answer, for `pieces` to write."""
    return {
        **identity,
        "object": "chat.completion",
        "choices": Array(choices),
        "usage": usage_body(run.usage),
        **({"prompt_token_ids": run.prompts[0]} if token_ids else {}),
    }


class Chat:
    """The endpoint of chat completions."""

    def __init__(self, server: ServerContext, entries: CallerEntries) -> None:
        self._server = server
        self._entries = entries

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        context, asked = await self._server.read(request, _read)
        run = await context.start(request, asked.prepared)
        identity: Identity = {
            "id": f"chatcmpl-{new_id()}",
            "created": int(time.time()),
            "model": context.answering(asked.prepared),
        }
        keep = self._keeper(request, asked, identity=identity, run=run)
        names = token_names(context.service.tokenizer, numbered=asked.numbered)
        token_ids = asked.prepared.spec.token_ids
        if asked.stream:
            chunks = ChatChunks(
                identity, run, names, tools=asked.tools, usage=asked.usage, token_ids=token_ids
            )
            kept = chunks if keep is None else KeepingChunks(chunks, len(run.choices), keep)
            return EventStream(run, kept)
        logprobs: list[Logprobs] = [
            ChatLogprobs(names) if asked.logprobs else NoLogprobs() for _ in run.choices
        ]
        answers = await collect(request, run, logprobs, slots=self._server.slots)
        if keep is not None:
            keep(answers)
        choices = (
            _choice(
                index,
                answer,
                tools=asked.tools,
                logprobs=written,
                ids=run.choices[index].take_ids() if token_ids else None,
            )
            for index, (answer, written) in enumerate(zip(answers, logprobs, strict=True))
        )
        body = _completion(identity, run, choices, token_ids=token_ids)
        return await whole(pieces(body), run_headers(run))

    def _keeper(
        self,
        request: Request,
        asked: _ReadRequest,
        identity: Identity,
        run: GenerationStream,
    ) -> Callable[[Sequence[Answer]], None] | None:
        """Return a function that stores the answers of a run; None if the request asks for none.

        Log-probabilities and token ids are not stored.
        """
        messages = asked.stored
        if messages is None:
            return None
        entries = self._entries.of(request)

        def keep(answers: Sequence[Answer]) -> None:
            choices = (
                _choice(index, answer, tools=asked.tools, logprobs=NoLogprobs(), ids=None)
                for index, answer in enumerate(answers)
            )
            body = tuple(pieces(_completion(identity, run, choices)))
            chat = StoredChat(**identity, body=body, messages=messages, metadata=asked.metadata)
            entries.put(chat.id, chat)

        return keep
