"""An event source without a dialect: detokenised text, stop strings, usage."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.service import EventSources
from quire.request import FinishReason, Output
from quire.text.detokenizer import Detokenizer
from quire.text.dialects.base import Dialect, Tool
from quire.text.events import Event, Failed, Finished, Text, Usage
from quire.text.stops import StopMatcher
from quire.text.tokenizer import Tokenizer


class PlainSource:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._count = 0
        self._done = False
        self.stopped = False

    def feed(self, output: Output) -> list[Event]:
        if self._done:
            return []
        self._count += len(output.token_ids)
        text = "".join(map(self._detokenizer.add, output.token_ids))
        safe, stop = self._stops.feed(text)
        events: list[Event] = [Text(safe, output.logprobs)] if safe or output.logprobs else []
        usage = Usage(output.prompt_tokens, self._count, 0, output.cached_tokens, output.reuse)
        if stop is not None:
            self._done = self.stopped = True
            return [*events, Finished(FinishReason.STOP, usage, stop)]
        if output.error is not None:
            return [*events, Failed(output.error, usage)]
        if output.finish is not None:
            rest = self._stops.flush()
            events += [Text(rest)] if rest else []
            return [*events, Finished(output.finish, usage)]
        return events


def plain_sources(tokenizer: Tokenizer) -> EventSources:
    """Sources that ignore the dialect."""

    def make(
        dialect: Dialect, prompt_ids: Sequence[int], tools: Sequence[Tool], stops: Sequence[str]
    ) -> PlainSource:
        return PlainSource(tokenizer, stops)

    return make
