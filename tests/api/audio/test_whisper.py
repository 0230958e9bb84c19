"""Transcripts by a small Whisper with random weights, through a real server and OpenAI's client."""

from __future__ import annotations

import io
import json
import wave
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest
from openai import OpenAI
from openai.types.audio import TranscriptionSegment

from tests.api.conftest import HTTP
from tests.support.child import Child, quire_serve
from tests.support.tiny_models import random_weights
from tests.support.whispering import CONFIG, FIRST_TIME, write_files

NAME = "whisper-tiny"


def recording(seconds: float, seed: int = 0) -> bytes:
    """Return a WAV file of rough sound."""
    samples = np.random.default_rng(seed).normal(0, 3000, int(seconds * 16000))
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.astype("<i2").tobytes())
    return written.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    folder: Path = tmp_path_factory.mktemp(NAME)
    write_files(folder)
    config = {**CONFIG, "max_target_positions": 96}  # it goes on as long as it may
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), random_weights(config))
    log = tmp_path_factory.mktemp("log")
    with quire_serve(log, str(folder), "--served-name", NAME) as child:
        yield child


@pytest.fixture
def client(server: Child) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=HTTP)


def transcribed(client: OpenAI, sound: bytes, **fields: Any) -> Any:
    file = ("a.wav", sound)
    return client.audio.transcriptions.create(file=file, model=NAME, **fields)


def segments(found: Any) -> list[dict[str, Any]]:
    """Return a transcript's segments; log-probabilities agree to 1e-4, as in any batch."""
    return [
        {**each.to_dict(), "avg_logprob": pytest.approx(each.avg_logprob, abs=1e-4)}
        for each in found.segments
    ]


def test_segments_have_the_times_that_the_model_wrote(client: OpenAI) -> None:
    found = transcribed(client, recording(4), response_format="verbose_json", language="de")
    assert (found.task, found.language, found.duration) == ("transcribe", "de", 4.0)
    heard = found.segments
    assert heard
    times = [time for each in heard for time in (each.start, each.end)]
    assert times == sorted(times)
    assert all(0 <= time <= 4 for time in times)
    assert all(token < FIRST_TIME for each in heard for token in each.tokens)
    for each in heard:
        TranscriptionSegment.model_validate(each.to_dict(), extra="forbid")
        assert -20 < each.avg_logprob < 0
        text = each.text.encode()
        assert each.compression_ratio == len(text) / len(zlib.compress(text))
    srt = transcribed(client, recording(4), response_format="srt", language="de")
    assert srt.count(" --> ") == len(heard)


def test_the_language_is_found_out(client: OpenAI) -> None:
    found = transcribed(client, recording(2), response_format="verbose_json")
    assert found.language in ("en", "de", "fr")
    named = transcribed(
        client, recording(2), response_format="verbose_json", language=found.language
    )
    assert [each.to_dict() for each in named.segments] == segments(found)


def test_an_unknown_language_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not one of de, en, fr"):
        transcribed(client, recording(1), language="xx")


@pytest.mark.slow
def test_long_sound_is_heard_piece_by_piece_at_once(client: OpenAI, server: Child) -> None:
    """Each piece is transcribed as it would be alone; the pieces share steps."""
    long = transcribed(client, recording(63), response_format="verbose_json", language="en")
    assert long.duration == 63.0
    starts = {each.seek for each in long.segments}
    assert len(starts) == 3
    again = transcribed(client, recording(63), response_format="verbose_json", language="en")
    assert [each.to_dict() for each in again.segments] == segments(long)


@pytest.mark.slow
def test_text_before_and_translations(client: OpenAI) -> None:
    plain = transcribed(client, recording(2), language="de")
    prompted = transcribed(client, recording(2), language="de", prompt="Names: Quire.")
    assert plain.text != prompted.text
    translated = client.audio.translations.create(
        file=("a.wav", recording(2)), model=NAME, response_format="verbose_json"
    )
    assert translated.text != plain.text
    assert translated.to_dict()["task"] == "translate"


def test_a_chat_with_it_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hi."}], max_tokens=4
        )
