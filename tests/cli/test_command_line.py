"""How the command line is read: what is wrong takes one line, and Ctrl-C is no error."""

from __future__ import annotations

import pytest

from quire.cli import main


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("serve", "--port", "abc"), "argument --port: 'abc': input should be a valid integer"),
        (("serve", "--prot", "80"), "unknown option --prot, did you mean --port?"),
        (("serve", "--kv-bitz=4"), "unknown option --kv-bitz, did you mean --kv-bits?"),
        (("bench", "--concurency", "3"), "unknown option --concurency, did you mean --concurrency"),
        (("serve", "--xyzzy"), "unknown option --xyzzy;"),
        (("serve", "--dtype", "int3"), "invalid choice: 'int3'"),
        (("sevre",), "invalid choice: 'sevre'"),
        ((), "required: command"),
    ],
)
def test_a_wrong_argument_takes_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *argv)


def test_a_wrong_dialect_is_refused_before_anything_is_opened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "/no/such/model", "--dialect", "foo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: no dialect 'foo'; there are gemma4,")
