"""`/v1/audio/transcriptions` and `/v1/audio/translations`: speech to text.

The schema is https://platform.openai.com/docs/api-reference/audio/createTranscription.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.api.audio.answers import SpokenText, Transcript, written
from quire.api.audio.requests import (
    SpeechRequest,
    Whispering,
    read_transcription,
    read_translation,
)
from quire.api.shared.context import Context, Reader, ServerContext
from quire.api.shared.fold import collect
from quire.api.shared.forms import read_form
from quire.api.shared.render import NoLogprobs
from quire.core.errors import RequestError
from quire.core.request import TokenLogprobs
from quire.serving.generation import Prepared

_FLOAT_BYTES = 32
"""Bytes of a number in a list."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """The answer to one piece of sound.

    Attributes:
        tokens, logprobs: empty if the request does not need them.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]

    def spoken(self, start: float, end: float, special: Container[int]) -> SpokenText:
        """Return the whole piece as one part of a transcript, without special tokens."""
        kept = [
            (token, logprob)
            for token, logprob in zip(self.tokens, self.logprobs, strict=False)
            if token not in special
        ]
        return SpokenText(
            start,
            end,
            self.text.strip(),
            window=start,
            tokens=[token for token, _ in kept],
            logprobs=[logprob for _, logprob in kept],
        )


class _KeptLogprobs(NoLogprobs):
    """The log-probabilities of the tokens that were sampled."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, entries: Sequence[TokenLogprobs], *, reasoning: bool = False) -> int:
        self.values += [each.logprob for each in entries]
        return _FLOAT_BYTES * len(entries)


class Transcriptions:
    """The endpoints of transcripts."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/audio/transcriptions`, a form with `file` and the other fields."""
        return await self._answer(request, read_transcription)

    async def translate(self, request: Request) -> Response:
        """Answer `POST /v1/audio/translations`, likewise: the text is English."""
        return await self._answer(request, read_translation)

    async def _answer(self, request: Request, reader: Reader[SpeechRequest]) -> Response:
        as_json = await _as_json(request, self._server.config.max_body_bytes)
        context, asked = await self._server.read(as_json, reader)
        if asked.whisper is None:
            answers = await self._heard(context, as_json, asked.prepared)
            special = context.service.tokenizer.special_ids
            parts = [
                each.spoken(start, end, special)
                for (start, end), each in zip(asked.pieces, answers, strict=True)
            ]
            language = asked.language
        else:
            language, parts = await self._whispered(context, as_json, asked, whisper=asked.whisper)
        transcript = Transcript(
            asked.task,
            language,
            seconds=asked.pieces[-1][1],
            temperature=asked.prepared.spec.sampling.temperature,
            parts=parts,
        )
        return written(transcript, asked.format)

    async def _whispered(
        self, context: Context, request: Request, asked: SpeechRequest, whisper: Whispering
    ) -> tuple[str, list[SpokenText]]:
        """Return the language and the segments that Whisper hears."""
        prepared = context.job_media.complete(asked.prepared)
        language = whisper.language
        if language is None:
            answers = await self._heard(context, request, whisper.detecting(prepared))
            known = {token: code for code, token in whisper.tokens.languages.items()}
            language = known[answers[0].tokens[0]]
        answers = await self._heard(context, request, whisper.asking(prepared, language))
        parts = [
            SpokenText(
                round(segment.start, 3),
                round(segment.end, 3),
                context.service.tokenizer.decode(list(segment.tokens)).strip(),
                window=start,
                tokens=segment.tokens,
                logprobs=segment.logprobs,
            )
            for (start, end), each in zip(asked.pieces, answers, strict=True)
            for segment in whisper.tokens.segments(each.tokens, start, end, logprobs=each.logprobs)
        ]
        return language, parts

    async def _heard(self, context: Context, request: Request, prepared: Prepared) -> list[_Heard]:
        """Return the answer to each prompt."""
        run = await context.start(request, prepared)
        kept = [_KeptLogprobs() for _ in run.choices]
        answers = await collect(request, run, kept, slots=self._server.slots)
        return [
            _Heard(answer.text, choice.take_ids(), logprobs.values)
            for answer, choice, logprobs in zip(answers, run.choices, kept, strict=True)
        ]


async def _as_json(request: Request, limit: int) -> Request:
    """Return a request with the form converted to a JSON body, which readers take.

    Raises:
        RequestError: it is not a form, or has no file.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RequestError(
            "The request must be multipart/form-data, with the sound in 'file'.",
            code="invalid_type",
        )
    fields: dict[str, Any] = {}
    async with read_form(request, limit, max_fields=64) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "file":
                    raise RequestError(f"'{name}' must be a text, not a file.", param=name)
                content = await value.read(limit)
                fields["sound"] = base64.b64encode(content).decode()
            elif name.endswith("[]"):
                fields.setdefault(name.removesuffix("[]"), []).append(value)
            else:
                fields[name] = value
    if "sound" not in fields:
        raise RequestError("The form has no 'file'.", param="file")
    if fields.get("stream") in ("true", "True", "1"):
        raise RequestError("'stream' is not offered for transcriptions.", param="stream")
    fields.pop("stream", None)
    if "chunking_strategy" in fields and fields["chunking_strategy"] != "auto":
        raise RequestError("'chunking_strategy' can only be 'auto'.", param="chunking_strategy")
    body: bytes | None = json.dumps(fields).encode()
    headers = [
        (name, value)
        for name, value in request.scope["headers"]
        if name not in (b"content-type", b"content-length", b"transfer-encoding")
    ]
    headers.append((b"content-type", b"application/json"))

    async def receive() -> Message:
        nonlocal body
        if body is None:
            return await request.receive()
        content, body = body, None
        return {"type": "http.request", "body": content, "more_body": False}

    scope = request.scope
    scope["headers"] = headers
    return Request(scope, receive)
