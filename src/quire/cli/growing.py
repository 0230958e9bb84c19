"""Shows an answer while it grows: raw in a pipe, as Markdown in a terminal."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

_FORMULAS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"))
_LONGEST_FORMULA = 5000
"""Most characters of a formula."""


class View(Protocol):
    """A view of one answer, from the request to its end."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def wait(self, words: str) -> None:
        """Show the reason for waiting, unless a part of the answer was shown."""
        ...

    def think(self, piece: str) -> None:
        """Show the next piece of the reasoning."""
        ...

    def say(self, piece: str) -> None:
        """Show the next piece of the answer."""
        ...


def view(console: Console) -> View:
    """Return the view that suits a console."""
    return Growing(console) if console.is_terminal else Plain(console)


class Plain:
    """A view that prints pieces as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._thinking = False

    def __enter__(self) -> Plain:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._console.print()

    def wait(self, words: str) -> None:
        """Print nothing: a pipe cannot take back a message."""

    def think(self, piece: str) -> None:
        self._thinking = True
        self._write(piece, "dim")

    def say(self, piece: str) -> None:
        if self._thinking:
            self._write("\n\n", "")
            self._thinking = False
        self._write(piece, "")

    def _write(self, text: str, style: str) -> None:
        self._console.print(
            text, style=style, end="", markup=False, highlight=False, soft_wrap=True
        )


class Growing:
    """A view that renders Markdown in a terminal. Complete blocks are printed once; only the rest
    is redrawn.

    A terminal cannot redraw what has left its screen, so only the last lines of a high rest are
    shown until it is complete.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True)
        self._rest = ""
        self._rendered: Callable[[str], RenderableType] = Answer
        self._keys = ExitStack()
        self._started = False  # whether anything stands above, from which a blank line parts

    def __enter__(self) -> Growing:
        self._keys.enter_context(silent_keys())
        self._live.start()
        self.wait("")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._keys:
            self._live.update("")
            self._live.stop()
            self._settle(len(self._rest))

    def wait(self, words: str) -> None:
        self._live.update(Spinner("dots", Text(words, style="dim")))

    def think(self, piece: str) -> None:
        self._rendered = _thought
        self._rest += piece
        # Lines of reasoning stand together: the blank line is for the answer below.
        complete = self._rest[: self._rest.rfind("\n") + 1]
        if complete.strip():
            self._console.print(_thought(complete))
            self._rest = self._rest[len(complete) :]
            self._started = True
        self._draw(apart=False)

    def say(self, piece: str) -> None:
        if self._rendered is _thought:
            if self._rest.strip():
                self._console.print(_thought(self._rest))
                self._started = True
            self._rest, self._rendered = "", Answer
        self._rest += piece
        if "\n" in piece:
            self._settle(_last_block(self._rest))
        self._draw(apart=self._started)

    def _settle(self, end: int) -> None:
        """Print the rest up to a position for good."""
        if self._rest[:end].strip():
            if self._started:
                self._console.print()
            self._console.print(self._rendered(self._rest[:end]))
            self._started = True
        self._rest = self._rest[end:]

    def _draw(self, *, apart: bool) -> None:
        self._live.update(_LastLines(self._rendered(self._rest), apart=apart))


@contextmanager
def silent_keys() -> Iterator[None]:
    """Do not echo pressed keys, so that Ctrl-C does not appear in what is drawn."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):  # no terminal
        yield
        return
    modes = [*before]
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Answer(Markdown):
    """Markdown that leaves backslashes and formulas as they are."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        reader = MarkdownIt().enable(["strikethrough", "table"]).disable("escape")
        reader.inline.ruler.before("emphasis", "formula", _formula)
        self.parsed = reader.parse(text)


def _formula(state: StateInline, silent: bool) -> bool:
    """Parse a formula as text, without Markdown inside."""
    pair = next((each for each in _FORMULAS if state.src.startswith(each[0], state.pos)), None)
    if pair is None:
        return False
    end = state.src.find(pair[1], state.pos + 2, state.pos + _LONGEST_FORMULA)
    if end < 0:
        return False
    if not silent:
        state.push("text", "", 0).content = state.src[state.pos : end + 2]
    state.pos = end + 2
    return True


def _thought(text: str) -> Text:
    return Text(text.rstrip("\n"), style="dim")


def _last_block(text: str) -> int:
    """Return where the last block of a Markdown text starts; the blocks before it are complete."""
    lines = [
        token.map[0]
        for token in Answer(text).parsed
        if token.level == 0 and token.nesting >= 0 and token.map
    ]
    line = lines[-1] if lines else 0
    return sum(len(each) for each in text.splitlines(keepends=True)[:line])


class _LastLines:
    """The last lines of a text that fit the screen.

    Args:
        apart: whether a blank line precedes the text.
    """

    def __init__(self, whole: RenderableType, *, apart: bool) -> None:
        self._whole = whole
        self._apart = apart

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        lines = [[Segment("")], *lines] if self._apart else lines
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()
