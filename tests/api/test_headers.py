"""Headers of a request are decoded once, whatever number of places looks one up."""

from __future__ import annotations

from typing import Any

from quire.api.shared.headers import headers_of

SENT = [(b"host", b"a"), (b"x-twice", b"first"), (b"x-twice", b"second"), (b"x-name", b"\xe9")]


def scope_with(headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http", "headers": headers}


def test_the_first_of_repeated_headers_counts_as_in_starlette() -> None:
    assert headers_of(scope_with(SENT)) == {"host": "a", "x-twice": "first", "x-name": "é"}


def test_a_second_look_decodes_nothing_and_other_headers_are_seen() -> None:
    scope = scope_with(SENT)
    first = headers_of(scope)
    assert headers_of(scope) is first
    rewritten = {**scope, "headers": [(b"host", b"b")]}  # as a round of tool calls does
    assert headers_of(rewritten) == {"host": "b"}
    assert headers_of(scope)["host"] == "a"
