"""`/v1/audio/transcriptions`: speech to text by a model that hears, asked in a conversation.

The schema is https://platform.openai.com/docs/api-reference/audio/createTranscription.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message

from quire.api.audio.pieces import RATE, as_url, pieces
from quire.api.shared.context import Context, ServerContext, decoding
from quire.api.shared.fold import collect
from quire.api.shared.limits import form_of
from quire.api.shared.render import NoLogprobs
from quire.api.shared.schema import DecodingFields
from quire.core.errors import NotOffered, RequestError
from quire.core.folder import read_object
from quire.media.kinds import limits_of
from quire.media.sound import decode
from quire.media.source import MediaSource
from quire.serving.generation import Generation, NeedsJob, Prepared, Thinking

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
_MOST_TOKENS = 448
"""Most tokens of one piece's text: about twice what is said in 28 seconds."""


class TranscriptionRequest(DecodingFields):
    """Every field of OpenAI's schema, and those of sampling; the form's fields, and its file."""

    sound: str = Field(description="the file, in base64")
    prompt: str | None = Field(default=None, max_length=4096)
    language: str | None = Field(default=None, max_length=64)
    response_format: Format = "json"
    stream: Literal[False] | None = Field(default=None, description="answers come whole")
    timestamp_granularities: list[Literal["segment"]] | None = Field(
        default=None, description="segments are pieces of up to 28 seconds; words have no times"
    )
    include: None = Field(default=None, description="log-probabilities are not given")
    chunking_strategy: Literal["auto"] | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the sound that is transcribed at once; times in seconds."""

    start: float
    end: float
    prepared: Prepared


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    pieces: Sequence[_Piece]
    format: Format
    language: str


async def _read(context: Context, request: Request, body: bytes) -> _ReadRequest:
    if context.jobs is not None:
        raise NeedsJob  # strangers' sound is decoded there
    fields = context.parse(request, body, TranscriptionRequest)
    context.check_model(fields.model)
    if "audio" not in context.service.modalities:
        raise NotOffered(
            f"{context.service.name} does not hear: serve a model whose 'modalities' in /v1/models "
            "hold 'audio'.",
            code="unsupported_model",
        )
    try:
        data = base64.b64decode(fields.sound, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("'sound' is no base64.", param="sound") from error
    limits = limits_of(context.config.media_limits)["audio"].each
    samples = decode(data, param="file", rate=RATE, limits=limits)
    asked = _asked(context, fields)
    common = decoding(context, fields, request.headers)
    if fields.temperature is None:
        common["sampling"] = replace(common["sampling"], temperature=0.0)
    found: list[_Piece] = []
    for start, end in pieces(samples):
        source = MediaSource(as_url(samples[start:end]), "file", "file", kind="audio")
        content = [{"type": "audio", "source": source}, {"type": "text", "text": asked}]
        spec = Generation(
            messages=({"role": "user", "content": content},),
            max_tokens=_MOST_TOKENS,
            thinking=Thinking(enabled=False),
            **common,
        )
        found.append(_Piece(start / RATE, end / RATE, await context.prepare(spec)))
    return _ReadRequest(found, fields.response_format, fields.language or "")


def _asked(context: Context, fields: TranscriptionRequest) -> str:
    """Return the question to the model: its own from its folder, else a common one."""
    file = Path(context.service.info.path) / "generation_config.json"
    own = read_object(file).get("transcription_prompt")
    if isinstance(own, str):
        asked = own
    else:
        language = fields.language or "its original language"
        asked = (
            f"Transcribe the following speech segment in {language}. "
            "Only output the transcription, with no newlines."
        )
    return f"{fields.prompt}\n{asked}" if fields.prompt else asked


class Transcriptions:
    """The endpoint of transcriptions."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/audio/transcriptions`, a form with `file` and the other fields."""
        asked_request = await _as_json(request, self._server.config.max_body_bytes)
        context, asked = await self._server.read(asked_request, _read)
        texts: list[str] = []
        for piece in asked.pieces:
            run = await context.start(asked_request, piece.prepared)
            slots = self._server.slots
            (answer,) = await collect(asked_request, run, [NoLogprobs()], slots=slots)
            texts.append(answer.text.strip())
        return _WRITERS[asked.format](asked, texts)


async def _as_json(request: Request, limit: int) -> Request:
    """Return a request with the form converted to a JSON body, which readers take.

    Raises:
        RequestError: it is not a form, or has no file.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RequestError("Sound comes as multipart/form-data.", code="invalid_type")
    fields: dict[str, Any] = {}
    async with form_of(request, limit).form(max_files=1, max_fields=64) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "file":
                    raise RequestError(f"'{name}' is no file here.", param=name)
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


def _segments(asked: _ReadRequest, texts: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"id": number, "start": piece.start, "end": piece.end, "text": text}
        for number, (piece, text) in enumerate(zip(asked.pieces, texts, strict=True))
    ]


def _usage(asked: _ReadRequest) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(asked.pieces[-1].end)}


def _json(asked: _ReadRequest, texts: Sequence[str]) -> Response:
    return JSONResponse({"text": " ".join(texts), "usage": _usage(asked)})


def _verbose(asked: _ReadRequest, texts: Sequence[str]) -> Response:
    return JSONResponse(
        {
            "task": "transcribe",
            "language": asked.language,
            "duration": asked.pieces[-1].end,
            "text": " ".join(texts),
            "segments": _segments(asked, texts),
            "usage": _usage(asked),
        }
    )


def _text(asked: _ReadRequest, texts: Sequence[str]) -> Response:
    return PlainTextResponse(" ".join(texts) + "\n")


def _srt(asked: _ReadRequest, texts: Sequence[str]) -> Response:
    lines = (
        f"{number}\n{_time(piece.start, ',')} --> {_time(piece.end, ',')}\n{text}\n\n"
        for number, (piece, text) in enumerate(zip(asked.pieces, texts, strict=True), 1)
    )
    return PlainTextResponse("".join(lines))


def _vtt(asked: _ReadRequest, texts: Sequence[str]) -> Response:
    lines = (
        f"{_time(piece.start, '.')} --> {_time(piece.end, '.')}\n{text}\n\n"
        for piece, text in zip(asked.pieces, texts, strict=True)
    )
    return PlainTextResponse("WEBVTT\n\n" + "".join(lines))


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


_WRITERS: dict[Format, Callable[[_ReadRequest, Sequence[str]], Response]] = {
    "json": _json,
    "text": _text,
    "srt": _srt,
    "verbose_json": _verbose,
    "vtt": _vtt,
}
