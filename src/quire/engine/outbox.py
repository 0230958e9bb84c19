"""Gathers the outputs of steps into messages to the server's process."""

from __future__ import annotations

import time
from collections.abc import Iterable

from quire.core.messages import NextTokens, StepOutputs
from quire.core.request import Output, Request

_GATHER_S = 0.030
"""Most seconds that a token is held back for the next ones of its stream, if few stream."""
_MESSAGES = 5000
"""Most messages to streams per second, for which the server needs about a fifth of a processor: if
many stream, tokens are held back so much longer."""
_MANY = 4000
"""Tokens per second from which tokens are held back: a message costs about 50 us per stream."""
FRAME_S = 0.008
"""Most seconds that a token is held back where steps compute on the server's cores. Sending and
rendering a message costs a tenth of a small model's step; no screen shows more than 120 a second.
"""


class Outbox:
    """Owns the outputs that have not been sent yet.

    Args:
        frame_s: most seconds that a token is held back while few tokens come.
    """

    def __init__(self, frame_s: float = 0.0) -> None:
        self._frame_s = frame_s
        self._started: set[str] = set()
        """Requests whose first output was sent."""
        self._accepted: dict[str, Output] = {}
        """Outputs of accepted requests that wait for a first token, if it comes soon."""
        self._accepted_at = 0.0
        """Time of the first of these."""
        self._held: dict[str, NextTokens] = {}
        """Tokens held back for the next message, by request."""
        self._patient: dict[str, int] = {}
        """`Request.hold` of requests that nobody streams."""
        self._unsent: dict[str, Output] = {}
        """Outputs of those, joined to one for each request."""
        self._sent_at = 0.0
        """Time of the last message that sent held tokens."""

    def expect(self, requests: Iterable[Request]) -> None:
        """Note how long the tokens of new requests may wait."""
        for request in requests:
            if request.hold:
                self._patient[request.id] = request.hold

    def pack(self, outputs: list[Output], step_s: float) -> StepOutputs:
        """Return the outputs of a step, and of earlier ones that waited, which are due to be sent.
        Most are packed as tokens only.

        First tokens and ends of answers are sent at once. If many tokens come in little time, or
        steps are short and compute on the server's cores, further tokens wait for the next ones of
        their stream, and the notice that a request is accepted waits for its first token. Tokens of
        an answer that is not streamed wait for its end.

        Args:
            step_s: expected duration of the next step.
        """
        now = time.perf_counter()
        full: list[Output] = []
        tokens: list[NextTokens] = []
        for output in outputs:
            name = output.request_id
            further = output.read is None and output.finish is None and not output.logprobs
            if further and name in self._started:
                self._hold(output)
                continue
            if name in self._patient:
                full += self._whole(output)
                continue
            if output.read == 0 and self._frame_s:
                self._accepted_at = self._accepted_at if self._accepted else now
                self._accepted[name] = output
                continue
            self._accepted.pop(name, None)
            if output.read is not None:
                full.append(output)
                continue
            if name in self._held:
                tokens.append(self._held.pop(name))
            full.append(output)
            if output.finish is None:
                self._started.add(name)
            else:
                self._started.discard(name)
        if self._accepted and now + step_s - self._accepted_at >= self._frame_s:
            full += self._accepted.values()
            self._accepted.clear()
        many = len(outputs) > _MANY * step_s
        gather_s = max(_GATHER_S, len(self._held) / _MESSAGES) if many else self._frame_s
        if now + step_s - self._sent_at >= gather_s:
            tokens += self._held.values()
            self._held.clear()
            self._sent_at = now
        return tuple(full), tuple(tokens)

    def _hold(self, output: Output) -> None:
        name, held = output.request_id, self._held.get(output.request_id)
        tokens = output.token_ids if held is None else held[1] + output.token_ids
        self._held[name] = name, tokens, output.accepted_drafts, output.rejected_drafts

    def _whole(self, output: Output) -> list[Output]:
        """Join an output to those that wait; return it if the answer ends, or if enough wait."""
        if output.read is not None:
            return []
        name = output.request_id
        if (waiting := self._unsent.pop(name, None)) is not None:
            output = output._replace(
                token_ids=waiting.token_ids + output.token_ids,
                logprobs=waiting.logprobs + output.logprobs,
            )
        if output.finish is not None:
            del self._patient[name]
        elif len(output.token_ids) < self._patient[name]:
            self._unsent[name] = output
            return []
        return [output]
