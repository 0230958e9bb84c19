"""The four-part regression of SwiftLM's PR 73, through HTTP, formats alternating by request.

4 bits on a short prompt, 8 bits on a short one, 4 bits on a prompt of many blocks that the layers
which share another's cache read too, and plain as the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.child import quire_serve

pytestmark = pytest.mark.slow

SHORT = "My name is Anna and I live in Rome. What is my name?"
LONG = " ".join(f"The sailor number {n} sold {n + 3} green apples." for n in range(18))
LONG += " Which code has Anna?"

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "4 bits, short": (SHORT, {"kv_bits": 4}),
    "8 bits, short": (SHORT, {"kv_bits": 8}),
    "4 bits, long": (LONG, {"kv_bits": 4}),
    "baseline": (LONG, {}),
}


@dataclass(frozen=True)
class Server:
    """A server with or without a prefix cache."""

    client: httpx.Client

    def ask(self, part: str, **more: Any) -> dict[str, Any]:
        """Return one part's answer, 12 tokens whatever they are."""
        prompt, fields = PARTS[part]
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = self.client.post("/v1/completions", json={**body, **fields, **more})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        assert answer["usage"]["completion_tokens"] == 12
        return answer

    def text(self, part: str) -> str:
        """Return the text of one part's answer."""
        text: str = self.ask(part)["choices"][0]["text"]
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    # No layer left plain, so that sharing layers read packed blocks. A server that does not get
    # ready raises with what it said.
    with (
        quire_serve(folder, "--kv-skip-layers", "none", "--kv-memory", "256MB") as child,
        httpx.Client(base_url=child.url, timeout=120) as client,
    ):
        yield Server(client)


@pytest.fixture(scope="module")
def alone(server: Server) -> dict[str, str]:
    """Return what each part gets by itself, on a cold cache."""
    return {part: server.text(part) for part in PARTS}


def test_long_prompt_is_long_enough(server: Server) -> None:
    usage = server.ask("4 bits, long")["usage"]
    assert usage["prompt_tokens"] > 4 * 64


def test_formats_alternate_request_by_request(server: Server, alone: dict[str, str]) -> None:
    """Warm now: each part reads its own cached blocks, and none of another format's."""
    for part in (*PARTS, *PARTS):
        assert server.text(part) == alone[part], part


def test_all_parts_at_once(server: Server, alone: dict[str, str]) -> None:
    parts = list(PARTS) * 2
    with ThreadPoolExecutor(len(parts)) as pool:
        for part, text in zip(parts, pool.map(server.text, parts), strict=True):
            assert text == alone[part], part


def test_packed_pages_are_reused_and_never_mixed(server: Server, alone: dict[str, str]) -> None:
    salted = {"cache_salt": "fresh"}
    first = server.ask("4 bits, long", **salted)["usage"]
    other = server.ask("4 bits, long", **salted, kv_bits=8)["usage"]
    again = server.ask("4 bits, long", **salted)["usage"]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in (first, other, again)]
    assert cached[:2] == [0, 0]
    assert cached[2] == (first["prompt_tokens"] - 1) // 64 * 64


@pytest.mark.parametrize("bits", [7, 1, "8/9", "many"])
def test_bits_that_are_not_offered(server: Server, bits: int | str) -> None:
    response = server.client.post(
        "/v1/completions", json={"prompt": SHORT, "max_tokens": 4, "kv_bits": bits}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_kv_bits", "kv_bits")
    assert "8/4" in error["message"]


def test_header_chooses_too(server: Server, alone: dict[str, str]) -> None:
    body = {"prompt": SHORT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = server.client.post(
        "/v1/completions", json=body, headers={"x-quire-kv-bits": "4", "x-quire-kv-scheme": "page"}
    )
    assert response.json()["choices"][0]["text"] == alone["4 bits, short"]
    refused = server.client.post("/v1/completions", json=body, headers={"x-quire-kv-scheme": "x"})
    assert refused.json()["error"]["code"] == "invalid_kv_scheme"
