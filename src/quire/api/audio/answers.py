"""Transcripts as clients ask for them: JSON, text, or subtitles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import JSONResponse, PlainTextResponse, Response

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A part of a transcript, with its times in seconds.

    Attributes:
        details: further members of a segment in `verbose_json`.
    """

    start: float
    end: float
    text: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole transcript.

    Attributes:
        task: "transcribe" or "translate".
        language: as the client named it, or the model's code of the one that it heard.
        seconds: length of the sound.
    """

    task: str
    language: str
    seconds: float
    parts: Sequence[SpokenText]

    @property
    def text(self) -> str:
        return " ".join(each.text for each in self.parts if each.text)

    @property
    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(self.seconds)}


def written(transcript: Transcript, format: Format) -> Response:
    """Return the transcript in a format."""
    return _WRITERS[format](transcript)


def _json(found: Transcript) -> Response:
    return JSONResponse({"text": found.text, "usage": found.usage})


def _verbose(found: Transcript) -> Response:
    segments = [
        {"id": number, "start": each.start, "end": each.end, "text": each.text, **each.details}
        for number, each in enumerate(found.parts)
    ]
    return JSONResponse(
        {
            "task": found.task,
            "language": found.language,
            "duration": found.seconds,
            "text": found.text,
            "segments": segments,
            "usage": found.usage,
        }
    )


def _text(found: Transcript) -> Response:
    return PlainTextResponse(found.text + "\n")


def _srt(found: Transcript) -> Response:
    lines = (
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{each.text}\n\n"
        for number, each in enumerate(found.parts, 1)
    )
    return PlainTextResponse("".join(lines))


def _vtt(found: Transcript) -> Response:
    lines = (
        f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{each.text}\n\n"
        for each in found.parts
    )
    return PlainTextResponse("WEBVTT\n\n" + "".join(lines))


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


_WRITERS: dict[Format, Callable[[Transcript], Response]] = {
    "json": _json,
    "text": _text,
    "srt": _srt,
    "verbose_json": _verbose,
    "vtt": _vtt,
}
