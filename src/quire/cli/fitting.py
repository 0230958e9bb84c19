"""Tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ENDLESS = 10_000


class FittingTable:
    """A table if it fits; otherwise each row's cells are listed below its first cell.

    Args:
        headings: column headings.
        texts: number of leading columns with text; other columns are right-aligned.
    """

    def __init__(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1
    ) -> None:
        self._headings = headings
        self._rows = rows
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        wanted = Measurement.get(console, options.update(max_width=_ENDLESS), table).maximum
        if wanted <= options.max_width:
            yield table
            return
        width = max(map(len, self._headings))
        for first, *others in self._rows:
            yield Text(first, style="bold", overflow="fold")
            for heading, cell in zip(self._headings[1:], others, strict=True):
                if cell:
                    yield Text(f"  {heading:{width}}  {cell}", overflow="fold")
        yield ""

    def _table(self) -> Table:
        table = Table(box=SIMPLE)
        for at, heading in enumerate(self._headings):
            table.add_column(heading, no_wrap=True, justify="left" if at < self._texts else "right")
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table
