"""Whole small models of families that see and hear, over HTTP: alone, in company, beside errors."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI

from tests.e2e.client import at_once
from tests.media.files import tone, video, wav
from tests.support.child import Child, quire_serve
from tests.support.served import FAMILIES, MEDIA_TOKENS, Served
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "model"
ANSWER = 12
Part = dict[str, Any]
Answer = tuple[list[list[int]], list[float], int]
"""Bytes of the tokens, their logarithmic probabilities, and tokens of the prompt."""


def noise(seed: int, width: int, height: int) -> PIL.Image.Image:
    rng = np.random.default_rng(seed)
    return PIL.Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def shown(seed: int) -> Part:
    file = io.BytesIO()
    noise(seed, 40, 24).save(file, "PNG")
    url = f"data:image/png;base64,{encoded(file.getvalue())}"
    return {"type": "image_url", "image_url": {"url": url}}


def heard(seed: int) -> Part:
    data = encoded(wav(tone(1.3, 220.0 + 110 * seed)))
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def watched(seed: int, **options: Any) -> Part:
    frames = [noise(10 * seed + number, 64, 48) for number in range(8)]
    data = encoded(video(frames, sound=tone(1, 220.0 + 110 * seed)))
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}", **options}}


FILES = {
    "image": shown,
    "audio": heard,
    "video": watched,
    "heard video": partial(watched, use_audio_in_video=True),
}
BROKEN: dict[str, Part] = {
    "image": {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    "audio": {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    "video": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAAGGZ0eXA="}},
}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Child, Any]]:
    root = tmp_path_factory.mktemp("served")
    family = FAMILIES[request.param]
    with quire_serve(root, str(family.write(root / MODEL)), "--dialect", "none") as child:
        client = OpenAI(base_url=f"{child.url}/v1", api_key="none", max_retries=0, timeout=120)
        yield family, child, client
        assert child.process.poll() is None, f"the server died: {child.log.read_text()}"


def messages(*parts: Part, words: str = "What is it?") -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def ask(client: Any, *parts: Part, salt: str, **fields: Any) -> Answer:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages(*parts),
        max_tokens=ANSWER,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True, "cache_salt": salt, **fields},
    )
    tokens = answer.choices[0].logprobs.content
    assert answer.usage.completion_tokens == len(tokens) == ANSWER
    return (
        [each.bytes for each in tokens],
        [each.logprob for each in tokens],
        answer.usage.prompt_tokens,
    )


def stream(client: Any, salt: str) -> str:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=messages(words="Say more."),
        max_tokens=4 * ANSWER,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "cache_salt": salt},
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def asked(family: Served) -> list[list[Part]]:
    """Return text alone, each kind of file twice, two pictures, and one file of each kind
    together.
    """
    each = [[FILES[kind](seed)] for kind in family.rows for seed in (1, 2)]
    return [[], *each, [shown(3), shown(4)], [FILES[kind](5) for kind in family.rows]]


def test_the_model_says_what_it_takes(served: tuple[Served, Child, Any]) -> None:
    family, child, _ = served
    (model,) = httpx.get(f"{child.url}/v1/models", timeout=HANG_S).json()["data"]
    assert set(model["modalities"]) == {"text"} | {kind.split()[-1] for kind in family.rows}


def test_files_are_counted_and_placed(served: tuple[Served, Child, Any]) -> None:
    family, child, client = served
    for kind, rows in family.rows.items():
        body = {"model": MODEL, "messages": messages(FILES[kind](1))}
        tokens = httpx.post(f"{child.url}/tokenize", json=body, timeout=HANG_S).json()["tokens"]
        marks = {"model": MODEL, "prompt": "".join(MEDIA_TOKENS), "add_special_tokens": False}
        known = httpx.post(f"{child.url}/tokenize", json=marks, timeout=HANG_S).json()["tokens"]
        assert len(known) == len(MEDIA_TOKENS)
        assert sum(token in known for token in tokens) == rows, kind
        assert ask(client, FILES[kind](1), salt="counted")[-1] == len(tokens)


@pytest.mark.parametrize("kv", [{}, {"kv_bits": 4}], ids=["plain", "page-4"])
def test_each_is_answered_as_if_alone(
    served: tuple[Served, Child, Any], kv: dict[str, Any]
) -> None:
    family, child, client = served
    wanted = [ask(client, *parts, salt="alone", **kv) for parts in asked(family)]
    text = stream(client, "alone")
    calls: list[Any] = [
        partial(ask, client, *parts, salt=f"company {turn}", **kv)
        for turn in range(2)
        for parts in asked(family)
    ]
    *found, beside = at_once([*calls, partial(stream, client, "company")])
    for number, (got, expected) in enumerate(zip(found, wanted * 2, strict=True)):
        assert got[0] == expected[0], f"request {number}"
        assert got[1] == pytest.approx(expected[1], abs=1e-3)
        assert got[2] == expected[2]
    assert beside == text
    assert len({tuple(each[1]) for each in wanted}) == len(wanted), "files change nothing"
    child.wait_idle()


def test_a_corrupt_file_is_its_own_requests_error(served: tuple[Served, Child, Any]) -> None:
    family, _, client = served
    kinds = {kind.split()[-1] for kind in family.rows}
    text, good = stream(client, "before"), ask(client, shown(1), salt="before")

    def refused(kind: str) -> str:
        with pytest.raises(BadRequestError) as caught:
            ask(client, shown(1), BROKEN[kind], salt="broken")
        return str(caught.value.code)

    calls: list[Any] = [partial(refused, kind) for kind in sorted(kinds)]
    beside = [partial(stream, client, "beside"), partial(ask, client, shown(1), salt="beside")]
    *codes, streamed, answer = at_once([*calls, *beside])
    assert codes == ["media_invalid"] * len(kinds)
    assert streamed == text
    assert answer[0] == good[0]


def test_the_sound_of_a_video_is_heard_in_each_protocol(
    served: tuple[Served, Child, Any],
) -> None:
    family, child, client = served
    if "heard video" not in family.rows:
        pytest.skip("it hears no sound within a video")
    anthropic: Any = Anthropic(base_url=child.url, api_key="none", max_retries=0)
    counts = []
    for hears in (False, True):
        part = watched(1, use_audio_in_video=hears)
        data = part["video_url"]["url"].partition(",")[2]
        source = {"type": "base64", "media_type": "video/mp4", "data": data}
        block = {"type": "video", "source": source, "use_audio_in_video": hears}
        words = {"type": "input_text", "text": "What is it?"}
        response = client.responses.create(
            model=MODEL, input=[{"role": "user", "content": [part, words]}], max_output_tokens=1
        )
        usage = anthropic.messages.create(model=MODEL, messages=messages(block), max_tokens=1).usage
        count = ask(client, part, salt="heard")[-1]
        assert count == response.usage.input_tokens
        assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        counts.append(count)
    assert counts[1] - counts[0] > family.rows["heard video"] - family.rows["video"]
