"""Log format of all processes of a server: text for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

WATCH_HEADER = "x-quire-watch"
"""Request header of clients that poll a model; the access log skips their requests."""

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JsonLines(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, and `message` or the record's `fields`.

    A record has `fields` by `log.info(..., extra={"fields": {...}})`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Formats one line per record, then its traceback.

    Unprintable characters are escaped, so that a client's text cannot start a line or send control
    sequences to the terminal.
    """

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def printable(text: str) -> str:
    """Return a text with characters that do not print escaped as Python escapes them."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def announce(text: str, form: str | None = None, *, level: int = logging.INFO) -> None:
    """Write a line for whoever started the process on standard error, whatever the log's level.

    Args:
        form: one of `FORMATS`; None takes that of `write_logs`.
    """
    if form is None:
        handlers = logging.getLogger().handlers
        form = "json" if any(isinstance(h.formatter, JsonLines) for h in handlers) else "text"
    if form == "json":
        fields = {"name": "quire", "levelname": logging.getLevelName(level), "msg": text}
        text = JsonLines().format(logging.makeLogRecord(fields))
    print(text, file=sys.stderr, flush=True)


def write_logs(level: str, form: str) -> None:
    """Send this process's log from a level on to standard error, as "text" or "json" lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
