"""Where options get their values, and that each source is refused what the flags are refused."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import commands, main
from quire.cli.commands import COMMANDS
from quire.demo import MODEL_DIR


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no variable of ours."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    return tmp_path


def parsed(monkeypatch: pytest.MonkeyPatch, command: str, *options: str) -> argparse.Namespace:
    """What the command would run with."""
    caught: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        caught.append(args)
        return 0

    monkeypatch.setattr(COMMANDS[command], "run", run)
    assert commands.run([command, *options]) == 0
    return caught[0]


def test_flags_come_before_variables_and_these_before_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home / "quire" / "config.toml"
    file.parent.mkdir()
    file.write_text('port = 1\nhost = "::1"\nmax-body = "1MB"\n[serve]\nmax-messages = 7\n')
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_MAX_MESSAGES", "8")
    args = parsed(monkeypatch, "serve", "--max-messages", "9")
    assert (args.max_messages, args.port, args.host) == (9, 2, "::1")
    assert (args.max_body, args.log_level) == (10**6, "info")


def test_a_file_may_be_named_by_flag_or_variable(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        (home / f"{number}.toml").write_text(f"port = {number}\n")
    monkeypatch.setenv("QUIRE_CONFIG", str(home / "1.toml"))
    assert parsed(monkeypatch, "serve").port == 1
    assert parsed(monkeypatch, "serve", "--config", str(home / "2.toml")).port == 2


@pytest.mark.parametrize(
    ("command", "variable", "value", "name", "expected"),
    [
        ("serve", "QUIRE_NO_PAGE", "yes", "no_page", True),
        ("serve", "QUIRE_NO_PAGE", "0", "no_page", False),
        (
            "serve",
            "QUIRE_CORS_ORIGIN",
            "http://a, http://b",
            "cors_origin",
            ["http://a", "http://b"],
        ),
        ("chat", "QUIRE_URL", "http://h:1", "url", "http://h:1"),
        ("bench", "QUIRE_URL", "http://h:1", "url", "http://h:1"),
        ("bench", "QUIRE_CONCURRENCY", "1,2", "concurrency", [1, 2]),
        ("cache", "QUIRE_KV_DISK", "/x", "kv_disk", Path("/x")),
        ("models", "QUIRE_DIR", "/x,/y", "dir", [Path("/x"), Path("/y")]),
        ("eval-kv", "QUIRE_TOKENS", "99", "tokens", 99),
        ("doctor", "QUIRE_KV_DISK", "/x", "kv_disk", Path("/x")),
    ],
)
def test_every_command_honours_variables(
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    variable: str,
    value: str,
    name: str,
    expected: Any,
) -> None:
    monkeypatch.setenv(variable, value)
    assert getattr(parsed(monkeypatch, command), name) == expected


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("prot = 80", "unknown key 'prot', did you mean port?"),
        ("[serve]\nkv-bitz = 4", "[serve] has the unknown key 'kv-bitz', did you mean kv-bits?"),
        ("[serv]\nport = 80", "no command is called [serv]"),
        ("port = 'x'", "port: 'x' is no whole number from 0"),
        ("[serve]\ndtype = 'int3'", "[serve] dtype: 'int3' is none of float32"),
        ("no-page = 'perhaps'", "no-page: 'perhaps' is neither true nor false"),
        ("api-key = 'secret'", "api-key-file"),
        ("port = ", "config.toml: Invalid value"),
        ("models = 3", "[[models]]"),
        ("[[models]]\nname = 'a'\nport = 3", "[[models]] a: 'port' is not a model's own"),
        ("[[models]]\nname = 'a'\nkv-memory = 'x'", "[[models]] a: kv-memory: 'x' is no number"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'", "two models are called 'a'"),
    ],
)
def test_a_wrong_file_takes_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], file: str, said: str
) -> None:
    (home / "quire").mkdir()
    (home / "quire" / "config.toml").write_text(file)
    assert main(["serve"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_variable_that_was_nearly_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_MAX_MESAGES", "3")
    assert main(["models"]) == 1
    assert "did you mean QUIRE_MAX_MESSAGES?" in capsys.readouterr().err
    monkeypatch.delenv("QUIRE_MAX_MESAGES")
    monkeypatch.setenv("QUIRE_PORT", "x")
    assert main(["serve"]) == 1
    assert "QUIRE_PORT: 'x'" in capsys.readouterr().err
    assert main(["serve", "--config", "/nowhere.toml"]) == 1
    assert "/nowhere.toml" in capsys.readouterr().err


def test_models_of_a_file_have_settings_of_their_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.cli.offers import offers
    from quire.cli.serve import server_config

    file = home / "models.toml"
    file.write_text(
        f"""
        [serve]
        idle-unload = 60
        max-context = 512
        [[models]]
        name = "small"
        model = "{MODEL_DIR}"
        max-context = 256
        kv-bits = 4
        temperature = 0.5
        pinned = true
        [[models]]
        name = "other"
        also-named = ["claude", "gpt"]
        idle-unload = 5
        """
    )
    args = parsed(monkeypatch, "serve", "--config", str(file))
    small, other = offers(args, server_config(args))
    assert (small.name, small.pinned, small.idle_unload_s) == ("small", True, 60)
    assert (small.engine.max_context, small.engine.kv_format.name) == (256, "page-4")
    assert small.serving.sampling_overrides == {"temperature": 0.5}
    assert (other.names, other.pinned) == (("other", "claude", "gpt"), False)
    assert (other.engine.max_context, other.idle_unload_s) == (512, 5)
    assert other.engine.model == str(MODEL_DIR)
    assert other.serving.sampling_overrides == {}
    given = parsed(monkeypatch, "serve", "--config", str(file), f"own={MODEL_DIR}")
    assert [each.name for each in offers(given, server_config(given))] == ["own"]


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "what is logged at least; default: info" in text
    assert "elements that share a scale in the uniform scheme; default: 64" in text
    assert "flags come before QUIRE_* variables, and these before the file" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "idle-unload", "eval-kv"):
        assert word in script


def test_bash_completes_commands_and_options() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "quire", "completion", "bash"], capture_output=True, text=True
    ).stdout
    for words, expected in (("quire se", "serve"), ("quire serve --idle", "--idle-unload")):
        count = len(words.split()) - 1
        ask = f"""{script}
COMP_WORDS=({words}); COMP_CWORD={count}
$(complete -p quire | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${{COMPREPLY[@]}}" """
        got = subprocess.run(["bash", "-c", ask], capture_output=True, text=True)
        assert expected in got.stdout.split(), got
