"""Reads chunked bodies and server-sent events from raw bytes.

An event is decoded as JSON only if needed (the last usage, an error): decoding all of ten thousand
events a second would distort the measurement.
"""

from __future__ import annotations

import json
import re

# A delta that brings any text: answer, reasoning, legacy completion, tool arguments or name.
_TEXT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|reasoning_text|arguments|name)"\s*:\s*"[^"]'
)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'^\{\s*"error"\s*:')


class Dechunker:
    """Removes HTTP/1.1 chunked framing from bytes cut anywhere. `done` is set after the
    last chunk.
    """

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Return the payload of the chunks that are now complete.

        Raises:
            ValueError: a chunk's size is not a hexadecimal number.
        """
        data = self._rest + data if self._rest else data
        whole: list[bytes] = []
        at = 0
        while not self.done:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].split(b";", 1)[0], 16)
            start = line_end + 2
            if size == 0:
                self.done = True
            elif len(data) < start + size + 2:
                break
            else:
                whole.append(data[start : start + size])
                at = start + size + 2
        self._rest = data[at:]
        return whole[0] if len(whole) == 1 else b"".join(whole)


class EventCounter:
    """Counts server-sent events with text, and keeps the last usage and the first error."""

    __slots__ = ("_rest", "_usage", "done", "error", "text_times")

    def __init__(self) -> None:
        self._rest = b""
        self._usage = b""
        self.text_times: list[float] = []
        self.error: str | None = None
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """Process the next bytes of the body, which arrived at `now`."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._payload(event[5:].strip(), now)
                continue
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._payload(line[5:].strip(), now)

    def _payload(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
        elif _ERROR.match(payload):
            self.error = self.error or error_message(payload)
        else:
            if _TEXT.search(payload):
                self.text_times.append(now)
            if _USAGE.search(payload):
                self._usage = payload

    def usage(self) -> tuple[int | None, int | None, int | None]:
        """Prompt, completion and cached tokens, from the server's last usage."""
        if not self._usage:
            return None, None, None
        usage = json.loads(self._usage)["usage"]
        # OpenAI's names, then those of mlx-vlm.
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        completion = usage.get("completion_tokens", usage.get("output_tokens"))
        details = usage.get("prompt_tokens_details") or {}
        return prompt, completion, details.get("cached_tokens")


def error_message(body: bytes) -> str:
    """Return the message in an OpenAI-shaped error body, else the start of the body as it came."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip()
