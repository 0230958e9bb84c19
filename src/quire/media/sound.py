"""Decodes untrusted sound into one channel at the model's sample rate.

WAV files with plain samples are read here; other formats by PyAV, see `containers`.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt

from quire.media.containers import check_codec, check_seconds, duration, opened
from quire.media.source import FileLimits, refusal

Samples = npt.NDArray[np.float32]

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_SIZE = 0x7FFFFF00
"""Programs that write WAV to a pipe state this or a larger length, as the true one is not known
yet.
"""
_RATES = range(1_000, 192_001)
_MAX_CHANNELS = 64

_ZERO_CROSSINGS = 24  # of the filter's sinc on either side
_KAISER_BETA = 10.0  # stop band at -100 dB
_PIECE = 1 << 15


def decode(data: bytes, *, param: str, rate: int, limits: FileLimits) -> Samples:
    """Return a file's sound `[samples]`, its channels averaged, between -1 and 1.

    Args:
        data: WAV, MP3, FLAC, Ogg, AAC, or the sound of MP4, WebM, Matroska or AVI.
        param: the request field that holds it, for errors.
        rate: wanted sample rate, in samples a second.

    Raises:
        RequestError: the sound lasts too long (`media_too_large`), is of another format, damaged or
            truncated (`media_invalid`), or needs PyAV, which is missing (`media_unsupported`).
    """
    plain = _Wave.of(data, param)
    if plain is not None:
        check_seconds(plain.seconds, limits, param)
        found, own = plain.samples(), plain.rate
    else:
        found, own = _decode(data, param, limits)
    if not len(found):
        raise refusal(param, "it holds no sound")
    return _brought(found, own, rate, param=param)


def within(data: bytes, *, param: str, rate: int, limits: FileLimits) -> Samples | None:
    """Return the sound of a video, as `decode` gives it; None if the video has none.

    Raises:
        RequestError: as `decode`.
    """
    found, own = _decode(data, param, limits)
    return _brought(found, own, rate, param=param) if len(found) else None


def _brought(found: Samples, own: int, rate: int, param: str) -> Samples:
    """Resample a file's sound from its own rate to the wanted one."""
    if not np.isfinite(found).all():
        raise refusal(param, "it holds samples that are no numbers")
    return resampled(found, own, rate)


def resampled(sound: Samples, rate: int, wanted: int) -> Samples:
    """Resample sound from `rate` to `wanted` samples a second, by a windowed sinc in polyphase
    form.

    J. O. Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/resample/.
    """
    if rate == wanted:
        return sound
    divisor = math.gcd(rate, wanted)
    up, down = wanted // divisor, rate // divisor
    cutoff = min(1.0, up / down)
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)  # input samples on either side
    offsets = np.arange(1 - reach, reach + 1) - np.arange(up)[:, None] / up  # [up, taps]
    window = np.i0(_KAISER_BETA * np.sqrt(np.maximum(0, 1 - (offsets / reach) ** 2)))
    taps = np.sinc(cutoff * offsets) * window
    taps = (taps / taps.sum(axis=1, keepdims=True)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(sound, reach), 2 * reach)
    count = math.ceil(len(sound) * up / down)
    out = np.empty(count, np.float32)
    for start in range(0, count, _PIECE):
        whole, phase = np.divmod(np.arange(start, min(start + _PIECE, count)) * down, up)
        piece = np.einsum("nt,nt->n", windows[whole + 1], taps[phase])
        out[start : start + len(piece)] = piece
    return out


class _Wave:
    """A RIFF file of plain samples whose chunks were located but not read."""

    def __init__(self, rate: int, channels: int, dtype: str, body: memoryview) -> None:
        self.rate = rate
        self._channels = channels
        self._dtype = dtype
        size = channels * (3 if dtype == "24" else np.dtype(dtype).itemsize)
        self._frames = len(body) // size
        self._body = body[: self._frames * size]

    @property
    def seconds(self) -> float:
        return self._frames / self.rate

    @classmethod
    def of(cls, data: bytes, param: str) -> _Wave | None:
        """Read the headers of a WAV file; None for another format, or for compressed samples.

        Raises:
            RequestError: the file is damaged or truncated.
        """
        if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
            return None
        chunks = _chunks(data)
        if b"fmt " not in chunks or len(chunks[b"fmt "][0]) < 16 or b"data" not in chunks:
            raise refusal(param, "the WAV file is damaged or cut short")
        head = bytes(chunks[b"fmt "][0])
        code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", head)
        if code == _EXTENSIBLE and len(head) >= 26:
            (code,) = struct.unpack_from("<H", head, 24)
        integers = {8: "u1", 16: "<i2", 24: "24", 32: "<i4"}
        dtype = {_PCM: integers, _FLOAT: {32: "<f4", 64: "<f8"}}.get(code, {}).get(bits)
        if dtype is None:
            return None
        if not 0 < channels <= _MAX_CHANNELS or rate not in _RATES:
            raise refusal(param, f"it has {channels} channels of {rate} samples a second")
        body, size = chunks[b"data"]
        if len(body) < size < _UNKNOWN_SIZE:
            raise refusal(param, "the WAV file is cut short")
        return cls(rate, channels, dtype, body=body)

    def samples(self) -> Samples:
        """Return the sound as one channel: `[samples]`."""
        if self._dtype == "24":
            low = np.frombuffer(self._body, np.uint8).reshape(-1, 3)
            wide = np.zeros((len(low), 4), np.uint8)
            wide[:, 1:] = low
            values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
        else:
            found = np.frombuffer(self._body, self._dtype)
            values = found.astype(np.float32)
            if found.dtype.kind == "u":
                values = values / 128 - 1
            elif found.dtype.kind == "i":
                values = values / 2.0 ** (8 * found.itemsize - 1)
        mixed: Samples = values.reshape(-1, self._channels).mean(axis=1, dtype=np.float32)
        return mixed


def _chunks(data: bytes) -> dict[bytes, tuple[memoryview, int]]:
    """Return the first chunk of each name, as much as the file holds, with its declared length."""
    found: dict[bytes, tuple[memoryview, int]] = {}
    view, at = memoryview(data), 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        found.setdefault(name, (view[at + 8 : at + 8 + size], size))
        at += 8 + size + size % 2
        if name == b"data":
            break
    return found


def _decode(data: bytes, param: str, limits: FileLimits) -> tuple[Samples, int]:
    """Decode the sound of a file of another format. Return its samples, none if it has no sound,
    and its rate.
    """
    with opened(data, param, "WAV, MP3, FLAC, Ogg, AAC, MP4, WebM, Matroska or AVI") as container:
        if not container.streams.audio:
            return np.empty(0, np.float32), _RATES.start
        stream = container.streams.audio[0]
        check_codec(stream, param)
        rate = stream.codec_context.sample_rate
        if rate not in _RATES:
            raise refusal(param, f"it has {rate} samples a second")
        check_seconds(duration(container, stream), limits, param)
        from av import AudioResampler

        planar = AudioResampler(format="fltp", rate=rate)  # the type alone changes
        pieces: list[Samples] = []
        count = 0
        for frame in container.decode(stream):
            for part in planar.resample(frame):
                pieces.append(part.to_ndarray().mean(axis=0, dtype=np.float32))
                count += len(pieces[-1])
            check_seconds(count / rate, limits, param)
    return np.concatenate(pieces) if pieces else np.empty(0, np.float32), rate
