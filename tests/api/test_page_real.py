"""The page with the embedded model behind it."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from tests.e2e.asking import SKILLS
from tests.media.files import greys, video
from tests.support.child import Child
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow


def said_digit() -> tuple[bytes, str]:
    """Return a sound, and what is said in it."""
    with (SKILLS / "sound_digits.jsonl").open() as lines:
        items = map(json.loads, lines)
        item = next(each for each in items if len(each["expected"]) == 1)
    data = item["messages"][0]["content"][0]["input_audio"]["data"]
    return base64.b64decode(data), item["expected"]


def test_a_sound_and_a_video_are_played_sent_and_understood(page: Any, child: Child) -> None:
    sound, digit = said_digit()
    page.add_init_script("localStorage['quire.parameters'] = '{\"temperature\": 0}'")
    page.goto(child.url)
    page.wait_for_selector("html[data-ready]")
    page.set_input_files(
        ".composer input[type=file]",
        {"name": "digit.mp3", "mimeType": "audio/mpeg", "buffer": sound},
    )
    page.wait_for_selector(".thumb:has-text('digit.mp3')")
    page.fill(".write textarea", "What digit is said?")
    page.keyboard.press("Enter")
    page.wait_for_selector(f".assistant:not([aria-busy]) .text:has-text('{digit}')")
    playable = "each => each.controls && each.error === null && each.duration > 0"
    assert page.locator(".user audio").evaluate(playable)
    data = video(greys(8, (112, 160)), "webm", "libvpx")
    film = {"name": "film.webm", "mimeType": "video/webm", "buffer": data}
    page.set_input_files(".composer input[type=file]", film)
    page.wait_for_selector(".thumb:has-text('film.webm')")
    page.fill(".write textarea", "What is it?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant:not([aria-busy]) >> nth=1")
    assert page.locator(".error:visible").count() == 0
    assert page.locator(".user video").evaluate(playable)
    page.reload()
    page.wait_for_selector(".user audio")
    page.wait_for_selector(".user video")


def test_the_live_view_shows_what_each_drafter_guessed(page: Any, child: Child) -> None:
    """Its figures are those of /metrics, and what `usage` said of the request is among them."""
    before = child.samples()
    text = "The red boat lies at the old pier. The red boat lies at the old pier."
    body = {
        "messages": [{"role": "user", "content": f"Say: {text}"}],
        "prediction": {"type": "content", "content": text},
        "temperature": 0,
    }
    answer = httpx.post(f"{child.url}/v1/chat/completions", json=body, timeout=HANG_S).json()
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted > 5
    page.goto(f"{child.url}/#live")
    card = page.locator(".card:has-text('Guessed tokens')")
    row = card.locator('li:has-text("the request\'s expected answer") .bar-value')
    row.wait_for()
    wait_until(lambda: _guessed(child, "accepted_draft") > _guessed(before, "accepted_draft"))
    right, drafted = (_guessed(child, name) for name in ("accepted_draft", "drafted"))
    wait_until(lambda: row.text_content() == f"{right:.0f} of {drafted:.0f}")


def _guessed(samples: Child | dict[str, float], name: str) -> float:
    """Return the server's count of tokens from expected answers."""
    samples = samples.samples() if isinstance(samples, Child) else samples
    return sum(
        value
        for each, value in samples.items()
        if each.startswith(f"quire_{name}_tokens_total") and 'drafter="prediction"' in each
    )
