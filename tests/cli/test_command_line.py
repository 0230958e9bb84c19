"""How the command line is read: what is wrong takes one line, and Ctrl-C is no error."""

from __future__ import annotations

import socket
import subprocess
import sys

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
        (("serve", "--kv-bit", "4"), "unknown option --kv-bit, did you mean --kv-bits?"),
        (("srve",), "no command is called 'srve', did you mean serve?"),
        (("--", "serve"), "required: COMMAND"),
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


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 0
    assert "start a coding agent" in capsys.readouterr().out


def test_wrong_bits_are_refused_by_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--kv-bits", "7"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    listed = "8, 6, 5, 4, 3, 2, two of these as in 8/4, none"
    assert line == f"quire: --kv-bits cannot be '7' in the scheme 'page'; offered are: {listed}."


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "--port takes another" in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = [sys.executable, "-m", "quire", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141
