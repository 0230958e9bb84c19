"""Speech to text: digits by the embedded model, and the formats of answers."""

from __future__ import annotations

import base64
import json

import numpy as np
import openai
import pytest
from openai import OpenAI
from openai.types.audio import TranscriptionSegment

from quire.api.audio.pieces import RATE, as_url, pieces
from quire.core.config import ServerConfig
from quire.demo import MODEL_DIR
from quire.media.kinds import limits_of
from quire.media.sound import decode
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve, openai_client
from tests.e2e.asking import SKILLS
from tests.support.child import Child


@pytest.fixture(scope="module")
def said() -> tuple[bytes, str]:
    """Return a recording of digits, and what they are."""
    with (SKILLS / "sound_digits.jsonl").open() as lines:
        item = json.loads(next(lines))
    (content,) = [each["content"] for each in item["messages"]]
    (part,) = [each for each in content if each["type"] == "input_audio"]
    return base64.b64decode(part["input_audio"]["data"]), item["expected"]


def test_digits_are_heard(child: Child, said: tuple[bytes, str]) -> None:
    client = OpenAI(base_url=f"{child.url}/v1", api_key="none", max_retries=0)
    sound, expected = said

    def heard(response_format: str) -> str | object:
        return client.audio.transcriptions.create(
            file=("digits.mp3", sound),
            model="quire-demo",
            response_format=response_format,  # type: ignore[call-overload]
        )

    plain = client.audio.transcriptions.create(file=("digits.mp3", sound), model="quire-demo")
    assert plain.text == expected
    assert heard("text") == expected + "\n"
    srt = heard("srt")
    assert isinstance(srt, str)
    assert srt.startswith("1\n00:00:00,000 --> 00:00:0")
    assert srt.endswith(f"\n{expected}\n\n")
    verbose = client.audio.transcriptions.create(
        file=("digits.mp3", sound), model="quire-demo", response_format="verbose_json"
    )
    assert verbose.segments is not None
    assert [each.text for each in verbose.segments] == [expected]
    (segment,) = verbose.segments
    TranscriptionSegment.model_validate(segment.to_dict(), extra="forbid")
    assert (segment.seek, segment.temperature, segment.no_speech_prob) == (0, 0, 0)
    assert -1 < segment.avg_logprob < 0
    assert Tokenizer.open(MODEL_DIR).decode(segment.tokens).strip() == expected
    assert 0.2 < verbose.duration < 10


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"stream": "true"}, "stream"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"keywords[]": "Quire"}, "'keywords' is not offered by this server: send them in prompt"),
        ({"temperature": "-1"}, "temperature"),
    ],
)
def test_what_is_not_offered_is_named(serve: Serve, fields: dict[str, str], named: str) -> None:
    url = f"{serve().url}/v1/audio/transcriptions"
    answer = HTTP.post(url, data=fields, files={"file": ("a.wav", b"RIFF")})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_a_model_that_does_not_hear_says_so(serve: Serve) -> None:
    client = openai_client(serve().url)
    with pytest.raises(openai.APIStatusError, match="takes no audio") as refused:
        client.audio.transcriptions.create(file=("a.wav", b"RIFF"), model="quire-demo")
    assert refused.value.status_code == 501
    answer = HTTP.post(f"{serve().url}/v1/audio/transcriptions", json={"model": "x"})
    assert answer.status_code == 400
    assert "multipart/form-data" in answer.text


def test_long_sound_is_cut_where_it_is_quiet() -> None:
    samples = np.ones(70 * RATE, np.float32)
    samples[25 * RATE : 26 * RATE] = 0
    found = list(pieces(samples))
    assert found[0][0] == 0
    assert 25 * RATE <= found[0][1] <= 26 * RATE
    assert all(end - start <= 28 * RATE for start, end in found)
    assert [end for _, end in found[:-1]] == [start for start, _ in found[1:]]
    assert found[-1][1] == len(samples)
    assert list(pieces(samples[:RATE])) == [(0, RATE)]


def test_pieces_are_files() -> None:
    samples = np.sin(np.arange(RATE) / 20).astype(np.float32)
    written = base64.b64decode(as_url(samples).split(",")[1])
    limits = limits_of(ServerConfig().media_limits)["audio"].each
    read = decode(written, param="file", rate=RATE, limits=limits)
    assert np.abs(read - samples).max() < 1e-3


def test_sound_has_a_limit(serve: Serve) -> None:
    url = serve(config=ServerConfig(max_body_bytes=1 << 20)).url
    for size in (1 << 20, 3 << 20):
        answer = HTTP.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", b"x" * size)})
        assert answer.status_code == 413, answer.text
