"""Logs for people: a record is one line, whatever a client sent."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from quire.core.logs import JsonLines, TextLines, announce, printable

HOSTILE = "/x\n2026-01-01 INFO quire.access GET /admin 200\r\x1b[31m\x9b2J\u202e\ud800 ü"


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("quire.access", logging.INFO, "", 0, message, arguments, None)


def test_what_does_not_print_is_escaped() -> None:
    for formatter in (TextLines(), JsonLines()):
        line = formatter.format(record("GET %s 404", HOSTILE))
        assert line.isprintable()
        assert "GET /x\\n2026" in line
    assert "\\x1b[31m" in TextLines().format(record("%s", HOSTILE))
    assert printable("plain ü") == "plain ü"


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    try:
        raise ValueError("\x1b[31m\rforged")
    except ValueError:
        failed = record("a job failed")
        failed.exc_info = sys.exc_info()
    lines = TextLines().format(failed).split("\n")
    assert len(lines) > 2
    assert all(line.isprintable() for line in lines)


def test_an_announcement_has_the_form_of_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce("quire serves m")
    assert capsys.readouterr().err == "quire serves m\n"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    announce("quire serves m", level=logging.WARNING)
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["level"], line["logger"]) == (
        "quire serves m",
        "warning",
        "quire",
    )
