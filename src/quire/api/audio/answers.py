"""Transcripts as clients ask for them: JSON, text, or subtitles."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import JSONResponse, PlainTextResponse, Response

from quire.api.shared.render import clamp

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


_FRAMES = 100
"""Frames of a spectrogram a second, in which OpenAI counts where a segment's window starts."""


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A part of a transcript, with its times in seconds.

    Attributes:
        window: start of the piece of sound in which it was heard, in seconds.
        tokens, logprobs: of the text, for `verbose_json`.
    """

    start: float
    end: float
    text: str
    window: float
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()

    def segment(self, number: int, temperature: float) -> dict[str, Any]:
        """Return the segment of `verbose_json`. No model here tells speech from silence."""
        text = self.text.encode()
        return {
            "id": number,
            "seek": round(self.window * _FRAMES),
            "start": self.start,
            "end": self.end,
            "text": self.text,
            "tokens": list(self.tokens),
            "temperature": temperature,
            "avg_logprob": sum(map(clamp, self.logprobs)) / max(1, len(self.logprobs)),
            "compression_ratio": len(text) / len(zlib.compress(text)),
            "no_speech_prob": 0.0,
        }


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole transcript.

    Attributes:
        task: "transcribe" or "translate".
        language: as the client named it, or the model's code of the one that it heard.
        seconds: length of the sound.
        temperature: of sampling.
    """

    task: str
    language: str
    seconds: float
    temperature: float
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
    segments = [each.segment(number, found.temperature) for number, each in enumerate(found.parts)]
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
