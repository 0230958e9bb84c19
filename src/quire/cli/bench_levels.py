"""Results of a benchmark's levels: their figures, and how these are printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from quire.cli.load import Timings


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds: median, 95th percentile and maximum."""

    median: float
    p95: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """Return the spread of values; None if there are none. Percentiles are nearest-rank."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        last = len(ordered) - 1
        ranks = (round(0.5 * last), round(0.95 * last), last)
        return cls(*(round(ordered[rank] * 1e3, 3) for rank in ranks))


@dataclass(frozen=True, slots=True)
class Level:
    """The result of one level of concurrency.

    Attributes:
        wall_s: from the first request's start to the last one's end.
        tokens_per_s: generated tokens of successful requests, over `wall_s`.
        events: number of streamed events with text; fewer than tokens if the server joins some.
        tokens_from_usage: whether the server counted the tokens (else events are counted).
        itl_ms: time between events with text, pooled over all requests.
        client_cpu: processor seconds of this client over `wall_s`. Near 1, the client is the
            bottleneck.
        errors: (message, number of requests that it ended).
    """

    concurrency: int
    requests: int
    failed: int
    wall_s: float
    tokens_per_s: float
    requests_per_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    events: int
    tokens_from_usage: bool
    ttft_ms: Spread | None
    itl_ms: Spread | None
    client_cpu: float
    errors: tuple[tuple[str, int], ...]


def summarise(answers: Sequence[Timings], concurrency: int, cpu_s: float) -> Level:
    """Return the result of one level from its answers."""
    good = [answer for answer in answers if answer.error is None]
    wall = max(a.ended for a in answers) - min(a.started for a in answers)
    tokens = sum(answer.tokens for answer in good)
    return Level(
        concurrency=concurrency,
        requests=len(answers),
        failed=len(answers) - len(good),
        wall_s=round(wall, 4),
        tokens_per_s=round(tokens / wall, 2),
        requests_per_s=round(len(good) / wall, 3),
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in good),
        completion_tokens=tokens,
        cached_tokens=sum(answer.cached_tokens or 0 for answer in good),
        events=sum(len(answer.text_times) for answer in good),
        tokens_from_usage=all(answer.completion_tokens is not None for answer in good),
        ttft_ms=Spread.of([answer.ttft for answer in good if answer.ttft is not None]),
        itl_ms=Spread.of([gap for answer in good for gap in answer.gaps]),
        client_cpu=round(cpu_s / wall, 3),
        errors=tuple(Counter(a.error for a in answers if a.error is not None).most_common()),
    )


def _cells(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return "-", "-", "-"
    return f"{spread.median:,.1f}", f"{spread.p95:,.1f}", f"{spread.max:,.1f}"


_HEADINGS = (
    *("streams", "ok", "tokens/s"),
    *("TTFT p50 ms", "TTFT p95 ms", "TTFT max ms"),
    *("gap p50 ms", "gap p95 ms", "gap max ms"),
)


def _row(level: Level) -> tuple[str, ...]:
    return (
        str(level.concurrency),
        f"{level.requests - level.failed}/{level.requests}",
        f"{level.tokens_per_s:,.1f}",
        *_cells(level.ttft_ms),
        *_cells(level.itl_ms),
    )


def table(levels: Sequence[Level]) -> Table:
    """Return the levels as a table for a wide terminal."""
    out = Table(box=SIMPLE)
    for heading in _HEADINGS:
        out.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for level in levels:
        out.add_row(*_row(level))
    return out


def stacked(levels: Sequence[Level]) -> str:
    """Return the levels one below the other, one figure a line, for a narrow terminal."""
    width = max(map(len, _HEADINGS))
    blocks = []
    for level in levels:
        figures = zip(_HEADINGS, _row(level), strict=True)
        blocks.append("\n".join(f"{name:{width}}  {figure:>10}" for name, figure in figures))
    return "\n\n".join(blocks)


def plain(levels: Sequence[Level]) -> str:
    """Return the levels as columns of text of any width, for a pipe or a file."""
    rows = [tuple(each.replace(" ", "_") for each in _HEADINGS), *map(_row, levels)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def show(levels: Sequence[Level], title: str, console: Console) -> None:
    """Print the levels in a form that fits the console."""
    shown: Table | str = table(levels)
    roomy = console.options.update(max_width=1000)
    if not console.is_terminal:
        shown = plain(levels)
    elif console.measure(shown, options=roomy).maximum > console.width:
        shown = stacked(levels)
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    console.print(shown, markup=False, highlight=False, soft_wrap=isinstance(shown, str))
