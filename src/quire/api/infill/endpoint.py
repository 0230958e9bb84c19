"""llama.cpp's `/infill`: fills a gap in a file, as editors ask.

The schema is https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.api.shared.context import Context, ServerContext, common_fields
from quire.api.shared.errors import openai_body
from quire.api.shared.fold import collect
from quire.api.shared.headers import headers_of
from quire.api.shared.pieces import compact
from quire.api.shared.render import NoLogprobs
from quire.api.shared.schema import GenerationFields, History
from quire.api.shared.sse import EventStream, run_headers
from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.core.request import FinishReason
from quire.serving.gaps import Gaps
from quire.serving.generation import Generation, Prepared
from quire.serving.streams import ChoiceEvent, GenerationStream
from quire.text.events import Failed, Finished, Text


class ContextFile(History):
    """A part of another file, which the model reads first."""

    filename: str | None = None
    text: str


class InfillRequest(GenerationFields):
    """The texts around a gap. `prompt` is the start of the answer."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ContextFile] | None = Field(default=None, max_length=1024)
    prompt: str | None = None

    def generation(self, context: Context, request: Request) -> Generation:
        """Return the protocol-independent generation request.

        Raises:
            RequestError: the model fills no gaps, or fields contradict this server's limits.
        """
        if self.n not in (None, 1):
            raise RequestError("'n' must be 1 here.", param="n", code="unsupported_parameter")
        common = common_fields(context, self, headers_of(request.scope), logprobs=None)
        gaps = Gaps(context.service.prompts, "input_suffix")
        files = [f"{each.filename or ''}\n{each.text}" for each in self.input_extra or ()]
        prompt = gaps.prompt(
            self.input_prefix, self.input_suffix, files=files, answer_start=self.prompt or ""
        )
        ends = common.stop_token_ids | gaps.ends
        return changed(common, prompts=(prompt,), max_tokens=self.max_tokens, stop_token_ids=ends)


class InfillChunks:
    """Renders a stream's chunks."""

    def __init__(self, model: str, run: GenerationStream) -> None:
        self._model = model
        self._run = run

    def render(self, batch: list[ChoiceEvent]) -> Iterator[bytes]:
        """Yield the chunks of a batch of events."""
        for _, event in batch:
            match event:
                case Text(text) if text:
                    body = {"index": 0, "content": text, "stop": False}
                case Finished():
                    body = _ending(self._model, self._run, end=event, text="")
                case Failed(error):
                    body = openai_body(error)
                case _:
                    continue
            yield b"data: " + compact(body) + b"\n\n"

    def end(self) -> bytes:
        """Return nothing: the chunk with `stop` is the last one."""
        return b""


async def _read(context: Context, request: Request, body: bytes) -> tuple[Prepared, bool]:
    fields = context.parse(request, body, InfillRequest)
    return await context.prepare(fields.generation(context, request)), fields.stream is True


class Infill:
    """The endpoint `POST /infill`, in llama.cpp's form."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def create(self, request: Request) -> Response:
        """`POST /infill`."""
        context, (prepared, stream) = await self._server.read(request, _read)
        run = await context.start(request, prepared)
        model = context.answering(prepared)
        if stream:
            return EventStream(run, InfillChunks(model, run))
        (answer,) = await collect(request, run, [NoLogprobs()], slots=self._server.slots)
        assert isinstance(answer.finish, Finished), "failures are raised"
        body = _ending(model, run, end=answer.finish, text=answer.text)
        return JSONResponse(body, headers=run_headers(run))


def _ending(model: str, run: GenerationStream, end: Finished, text: str) -> dict[str, Any]:
    """Return a whole answer, or the last chunk of a stream, which holds no text."""
    usage = run.usage
    kinds = {FinishReason.STOP: "eos"}
    kind = "word" if end.stop is not None else kinds.get(end.reason, "limit")
    return {
        "index": 0,
        "content": text,
        "stop": True,
        "model": model,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
        "stop_type": kind,
        "stopping_word": end.stop or "",
    }
