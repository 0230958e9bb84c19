"""Finds single members of a large JSON object without parsing the rest."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Collection
from typing import Any

_MARK = re.compile(rb'["{}\[\]]')
_KEY_ENDS = re.compile(rb"\s*:\s*")
_SCALAR = re.compile(rb'"(?:[^"\\]|\\.){0,1000}"|[\w.+-]{1,64}')
_AT_ONCE = 2000
"""Number of marks, or of quotes within a string, after which the event loop gets a turn."""


async def members(body: bytes, names: Collection[str]) -> dict[str, object]:
    """Return top-level members with these names whose values are short scalars.

    Of a repeated name the last one counts, as for `json`. Invalid JSON may give any result; it is
    refused when parsed whole.
    """
    found: dict[str, object] = {}
    wanted = {json.dumps(name).encode(): name for name in names}
    at = depth = count = 0
    while (mark := _MARK.search(body, at)) is not None:
        count += 1
        if count % _AT_ONCE == 0:
            await asyncio.sleep(0)
        at = mark.end()
        if mark[0] != b'"':
            depth += 1 if mark[0] in b"{[" else -1
            continue
        start, at = at - 1, await _string_end(body, at)
        name = wanted.get(body[start:at]) if depth == 1 and at - start < 64 else None
        if name is None or (colon := _KEY_ENDS.match(body, at)) is None:
            continue
        at = colon.end()
        if (value := _SCALAR.match(body, at)) is not None:
            at = value.end()
            found[name] = _decoded(value[0])
    return found


async def _string_end(body: bytes, at: int) -> int:
    """Return the offset after the closing quote of the string whose first character is at `at`."""
    for count in itertools.count(1):
        if count % _AT_ONCE == 0:
            await asyncio.sleep(0)
        quote = body.find(b'"', at)
        if quote < 0:
            return len(body)
        backslashes, before = 0, quote - 1
        while before >= at and body[before] == 0x5C:
            backslashes, before = backslashes + 1, before - 1
        at = quote + 1
        if backslashes % 2 == 0:
            break
    return at


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
