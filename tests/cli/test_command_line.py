"""The command line: mistakes are told in one line, and Ctrl-C is no error."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import quire
import quire.cli.serve
from quire.cli import main
from quire.cli.commands import parse
from quire.cli.run import RunCommand

ENDLESS = "/dev/zero: the file is larger than the limit of 1 MiB"


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line that a command line is refused with."""
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("serve", "--threads", "100000"), "argument --threads: must be at most 1,024"),
        (("serve", "--port", "abc"), "argument --port: must be a whole number, not 'abc'"),
        (("serve", "--pipeline-parallel", "2"), "unknown option --pipeline-parallel;"),
        (("serve", "--prot", "80"), "unknown option --prot, did you mean --port?"),
        (("serve", "--kv-bitz=4"), "unknown option --kv-bitz, did you mean --kv-bits?"),
        (("bench", "--concurency", "3"), "unknown option --concurency, did you mean --concurrency"),
        (("serve", "--xyzzy"), "unknown option --xyzzy;"),
        (("serve", "--dtype", "int3"), "invalid choice: 'int3'"),
        (("serve", "--kv-bit", "4"), "unknown option --kv-bit, did you mean --kv-bits?"),
        (("rnu",), "no command is called 'rnu', did you mean run?"),
        (("run", "m", "hi", "--temprature", "0"), "--temprature, did you mean --temperature?"),
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
    assert main(["serve", "no-such/model", "--dialect", "foo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: no dialect 'foo'; there are gemma4,")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("pull", "../model"), "'../model' is neither a folder nor a hub id"),
        (("pull", "a--b/model"), "'a--b/model' is neither a folder nor a hub id"),
        (("eval-kv", "--text", "/no/text"), "--text: /no/text: No such file"),
        (("eval-kv", "--skills", "/no/skills"), "--skills: /no/skills: No such file"),
        (("eval-kv", "--json", "/no/report"), "--json: /no/report: No such file"),
        (("eval-kv", "--plot", "/no/plot"), "--plot: /no/plot: No such file"),
        (("serve", "--served-name", "\udcff"), r"'\udcff' cannot be a model's name"),
        (("serve", "--api-key", ""), "--api-key: the key is empty"),
        (("serve", "--api-key-file", "/dev/null"), "--api-key-file: the file is empty"),
        (("serve", "--api-key-file", "/dev/zero"), f"--api-key-file: {ENDLESS}"),
        (("serve", "--metrics-key-file", "/dev/zero"), f"--metrics-key-file: {ENDLESS}"),
        (("serve", "--mcp-servers", "/dev/zero"), f"--mcp-servers: {ENDLESS}"),
        (("serve", "--hosts", "/dev/zero"), "/dev/zero: cannot be read as a hosts file: the file"),
        (("serve", "--config", "/dev/zero"), ENDLESS),
        (("serve", "/no/such/model"), "'/no/such/model' is neither a folder nor a hub id"),
        (("serve", "quire-demo", "b=../model"), "'../model' is neither a folder nor a hub id"),
        (("serve", "--speculate", "draft=../model"), "'../model' is neither a folder nor a hub"),
        (("serve", "/dev"), "/dev: no config.json"),
        (("serve", "--adapter", "../a"), "'../a' is neither a folder nor a hub id"),
        (("serve", "--adapter", "a=/dev"), "/dev: no adapter_config.json"),
        (("serve", "--port", "0", "--files", "/proc/no"), "--files: /proc/no: No such file"),
    ],
)
def test_what_cannot_be_used_is_said_before_any_work(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9 (Connection refused)"),
        ("http://[::1", "not a URL: 'http://[::1': Invalid IPv6 URL"),
        ("http://here:99999", "not a URL: 'http://here:99999': Port out of range"),
    ],
)
@pytest.mark.parametrize("command", ["ps", "chat", "bench"])
def test_commands_without_a_server_exit_with_2(
    capsys: pytest.CaptureFixture[str], command: str, url: str, said: str
) -> None:
    assert main([command, "--url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("command", ["serve", "doctor", "eval-kv", "pull", "rm"])
def test_an_empty_model_is_not_the_embedded_one(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A script whose variable is not set passes an empty name."""
    assert "the name of the model is empty" in refused(capsys, command, "")


def test_a_report_that_cannot_be_written_is_said_before_the_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--json", "/no/report"]) == 2
    assert "--json: /no/report: No such file" in capsys.readouterr().err


def test_options_may_stand_between_arguments() -> None:
    command = parse(["run", "m", "--temperature", "0", "What", "--max-tokens", "9", "is it?"])
    assert isinstance(command, RunCommand)
    assert (command.model, command.prompt) == ("m", ("What", "is it?"))
    assert (command.temperature, command.max_tokens) == (0, 9)


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 0
    assert "start a coding agent" in capsys.readouterr().out


def test_wrong_bits_are_refused_by_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--kv-bits", "7"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    listed = "8, 6, 5, 4, 3, 2, none, or two numbers such as 8/4, for keys and values"
    assert line == f"quire: --kv-bits cannot be '7' in the scheme 'page'. Offered: {listed}."


@pytest.mark.parametrize("columns", ["1", "2", "3"])
def test_a_narrow_terminal_has_help(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        main(["models", "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "--port takes another" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["port", "host"])
def test_no_engine_starts_before_the_address_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def start(*_: object) -> NoReturn:
        pytest.fail("an engine was started")

    monkeypatch.setattr(quire.cli.serve, "start_engine", start)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = ("--port", str(taken.getsockname()[1]))
        assert main(["serve", *(port if fault == "port" else ("--host", "0.0.0.0"))]) == 1
    said = "cannot bind 127.0.0.1" if fault == "port" else "no API key is set"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [(">&-", 0, ""), ("> /dev/full", 1, "quire: No space left on device")],
)
def test_output_that_goes_nowhere_shows_no_trace(output: str, status: int, said: str) -> None:
    command = f"{sys.executable} -m quire completion bash {output}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (status, said)


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = [sys.executable, "-m", "quire", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141


_INTERRUPTED = """
import sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
from quire.cli import main
slow = {"typing", "re", "enum", "logging"} & (sys.modules.keys() - before)
assert not slow, f"imported where Ctrl-C prints a trace: {slow}"
def run(argv):
    exec("raise KeyboardInterrupt")  # as where a command makes a dataclass
commands = sys.modules["quire.cli.commands"] = type(sys)("commands")
commands.run = run
sys.exit(main([]))
"""
_INTERRUPTED_IMPORT = """
import signal
import sys
sys.path.insert(0, sys.argv[1])
from quire.cli import main
class Commands(type(sys)):
    @property
    def run(self):
        signal.raise_signal(signal.SIGINT)
        print("imported whole")
        return lambda argv: print("run")
sys.modules["quire.cli.commands"] = Commands("commands")
sys.exit(main([]))
"""


@pytest.mark.parametrize(
    ("script", "printed"), [(_INTERRUPTED, ""), (_INTERRUPTED_IMPORT, "imported whole\n")]
)
def test_ctrl_c_at_any_moment_prints_nothing_and_ends_with_130(
    tmp_path: Path, script: str, printed: str
) -> None:
    """Imports end first: extension modules print and drop an interrupt."""
    (tmp_path / "interrupted.py").write_text(script)
    sources = str(Path(quire.__file__).parents[1])
    command = [sys.executable, "-S", "-m", "interrupted", sources]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, printed, "")
