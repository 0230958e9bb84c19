"""Converts media in messages of Python programs (paths, PIL images, arrays) to `data:` URLs."""

from __future__ import annotations

import base64
import io
import mimetypes
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.core.errors import RequestError
from quire.core.limited_files import MEDIA_BYTES, read_limited_bytes

_KINDS = ("image", "audio", "video")
_PDF = "application/pdf"


def with_urls(messages: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with media as `data:` URLs. A text is the user's message.

    A part of `content` may be a text, a path, a PIL image, an array of pixels `[height, width, 3]`,
    or a mapping `{"type": "image", "image": ...}`, or likewise for "video" and "audio". The value
    is a URL, a path, a PIL image or array, or for sound `(samples, rate)` with samples from -1 to
    1. OpenAI's own parts are not changed.

    Raises:
        RequestError: a part has another form, or a file cannot be read.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise _refused(param, f"a message is a dict with 'role' and 'content', not a {kind}")
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return dict(message)
    parts = [_part(part, f"{param}.content[{index}]") for index, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, param: str) -> dict[str, Any]:
    match part:
        case str():
            return {"type": "text", "text": part}
        case Path():
            return _file(part, param)
        case Image.Image() | np.ndarray():
            return _url_part("image", _image(part, param))
        case Mapping():
            kind = part.get("type")
            if kind in _KINDS and kind in part:
                beside = {key: value for key, value in part.items() if key not in ("type", kind)}
                return _url_part(kind, _url(kind, part[kind], param), beside)
            return dict(part)
        case _:
            raise _refused(param, f"a part of content cannot be a {type(part).__name__}")


def _url_part(kind: str, url: str, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    name = f"{kind}_url"
    return {"type": name, name: {"url": url, **(beside or {})}}


def _url(kind: str, value: Any, param: str) -> str:
    """Return the URL for the value of a part of type `kind`."""
    match value:
        case str() if ":" in value and value.partition(":")[0] in ("http", "https", "data", "file"):
            return value
        case str() | Path():
            return _read(Path(value), param)
        case (samples, int(rate)) if kind == "audio":
            return _sound(np.asarray(samples), rate, param)
        case Image.Image() | np.ndarray() if kind == "image":
            return _image(value, param)
        case bytes():
            return _data_url(f"{kind}/*", value)
        case _:
            raise _refused(param, f"a {type(value).__name__} is no {kind}")


def _file(path: Path, param: str) -> dict[str, Any]:
    """Return the part for a file, whose kind is guessed from its name."""
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")
    url = _read(path, param)
    if "/".join(kind[::2]) == _PDF:
        return {"type": "file", "file": {"file_data": url, "filename": path.name}}
    if kind[0] not in _KINDS:
        raise _refused(param, f"the name {path.name!r} does not tell the kind of media")
    return _url_part(kind[0], url)


def _read(path: Path, param: str) -> str:
    try:
        data = read_limited_bytes(path.expanduser(), MEDIA_BYTES)
    except OSError as error:
        raise _refused(param, f"{path}: {error.strerror}") from error
    return _data_url(mimetypes.guess_type(path.name)[0] or "application/octet-stream", data)


def _image(value: Image.Image | np.ndarray[Any, Any], param: str) -> str:
    picture = _of_pixels(value, param) if isinstance(value, np.ndarray) else value
    written = io.BytesIO()
    picture.save(written, "PNG")
    return _data_url("image/png", written.getvalue())


def _of_pixels(pixels: np.ndarray[Any, Any], param: str) -> Image.Image:
    if pixels.ndim not in (2, 3):
        raise _refused(param, f"pixels are [height, width, 3], not {list(pixels.shape)}")
    if np.issubdtype(pixels.dtype, np.floating):  # values from 0 to 1
        pixels = np.clip(np.rint(pixels * 255), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def _sound(samples: np.ndarray[Any, Any], rate: int, param: str) -> str:
    """Return a WAV file of samples `[time]` or `[time, channels]`, which are floats or 16-bit
    integers.
    """
    if samples.ndim not in (1, 2):
        raise _refused(param, f"samples are [time] or [time, channels], not {list(samples.shape)}")
    if np.issubdtype(samples.dtype, np.floating):
        samples = np.clip(np.rint(samples * 32767), -32768, 32767)
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return _data_url("audio/wav", written.getvalue())


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(f"'{param}' cannot be used: {reason}.", param=param, code="media_invalid")
