"""Options get their values from several sources; each is checked as the flags are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.cli.commands import COMMANDS, parse, run
from quire.cli.reference import reference
from quire.cli.serve import ServeCommand
from quire.cli.settings import Command
from quire.core.errors import NoRoom, QuireError
from quire.demo import MODEL_DIR


def test_flags_come_before_variables_and_these_before_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home / "quire" / "config.toml"
    file.parent.mkdir()
    file.write_text('port = 1\nhost = "::1"\nmax-body = "1MB"\n[serve]\nmax-messages = 7\n')
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_MAX_MESSAGES", "8")
    args = parse(["serve", "--max-messages", "9"])
    assert (args.max_messages, args.port, args.host) == (9, 2, "::1")
    assert (args.max_body, args.log_level) == (10**6, "info")


def test_a_file_may_be_named_by_flag_or_variable(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        (home / f"{number}.toml").write_text(f"port = {number}\n")
    monkeypatch.setenv("QUIRE_CONFIG", str(home / "1.toml"))
    assert parse(["serve"]).port == 1
    assert parse(["serve", "--config", str(home / "2.toml")]).port == 2


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
            ("http://a", "http://b"),
        ),
        ("chat", "QUIRE_URL", "http://h:1", "url", "http://h:1"),
        ("bench", "QUIRE_URL", "http://h:1", "url", "http://h:1"),
        ("bench", "QUIRE_CONCURRENCY", "1,2", "concurrency", (1, 2)),
        ("cache", "QUIRE_KV_DISK", "/x", "kv_disk", Path("/x")),
        ("models", "QUIRE_DIR", "/x,/y", "dir", (Path("/x"), Path("/y"))),
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
    assert getattr(parse([command]), name) == expected


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("prot = 80", "unknown key 'prot', did you mean port?"),
        ("[serve]\nkv-bitz = 4", "[serve] unknown key 'kv-bitz', did you mean kv-bits?"),
        ("[serv]\nport = 80", "no command is called [serv], did you mean serve?"),
        ("port = 'x'", "port: must be a whole number, not 'x'"),
        ("[serve]\ndtype = 'int3'", "dtype: must be 'float32'"),
        ("port = 65536", "port: must be at most 65,535, not 65536"),
        ("no-page = 'perhaps'", "no-page: must be true or false, not 'perhaps'"),
        ("api-key = 'secret'", "api-key-file"),
        ("port = ", "config.toml: Invalid value"),
        ("config = 'other.toml'", "unknown key 'config'"),
        ("port = " + "9" * 5000, "Exceeds the limit"),
        ("kv-group-size = inf", "kv-group-size: inf is not a whole number"),
        ("kv-group-size = [64]", "kv-group-size: [64] is not a whole number"),
        ("kv-disk = 'x\\u0000'".replace("'", '"'), "is not a path: embedded null"),
        ("models = 3", "[[models]]"),
        ("[[models]]\nname = 'a'\nport = 3", "[[models]] a: 'port' applies to all models"),
        ("[[models]]\nname = 'a'\nkv-bit = 4", "[[models]] a: unknown key 'kv-bit', did you mean"),
        ("[[models]]\nname = 'a'\nkv-memory = 'x'", "[[models]] a: kv-memory: 'x' is not a number"),
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
    assert str(home / "quire" / "config.toml") in line or "two models" in line


def test_what_other_commands_read_is_a_warning(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "quire").mkdir()
    (home / "quire" / "config.toml").write_text("[serve]\nkv-bitz = 4\n[ps]\nurl = 'http://h:1'\n")
    assert parse(["models"]).command == "models"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: warning: ")
    assert "[serve] unknown key 'kv-bitz'" in line


def test_a_variable_of_no_option_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_MAX_MESAGES", "3")
    monkeypatch.setenv("QUIRE_FOO", "3")
    monkeypatch.setenv("QUIRE_LAUNCH_KEY", "set by quire launch codex")
    monkeypatch.setenv("QUIRE_BUILD_KERNELS", "all")
    assert parse(["serve"]).command == "serve"
    assert capsys.readouterr().err.splitlines() == [
        "quire: warning: unknown variables, which have no effect: "
        "QUIRE_FOO, QUIRE_MAX_MESAGES (did you mean QUIRE_MAX_MESSAGES?)"
    ]


def test_a_wrong_value_takes_one_line_in_the_commands_that_read_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_PORT", "x")
    assert parse(["models"]).command == "models"
    assert capsys.readouterr().err == ""
    assert main(["serve"]) == 1
    assert "QUIRE_PORT: must be a whole number, not 'x'" in capsys.readouterr().err
    assert main(["serve", "--config", "/nowhere.toml"]) == 1
    assert "/nowhere.toml" in capsys.readouterr().err


def test_models_of_a_file_have_settings_of_their_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.cli.model_configs import model_configs

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
    args = parse(["serve", "--config", str(file)])
    small, other = model_configs(args, args.server_config())
    assert (small.name, small.pinned, small.idle_unload_s) == ("small", True, 60)
    assert (small.engine.max_context, small.engine.kv_format.name) == (256, "page-4")
    assert small.serving.sampling_overrides == {"temperature": 0.5}
    assert (other.names, other.pinned) == (("other", "claude", "gpt"), False)
    assert (other.engine.max_context, other.idle_unload_s) == (512, 5)
    assert other.engine.model == str(MODEL_DIR)
    assert other.serving.sampling_overrides == {}
    given = parse(["serve", "--config", str(file), f"own={MODEL_DIR}"])
    assert [each.name for each in model_configs(given, given.server_config())] == ["own"]


def test_of_several_models_each_has_its_own_folder_for_blocks() -> None:
    from quire.cli.model_configs import model_configs

    def folders(*models: str) -> list[str | None]:
        given = parse(["serve", *models, "--kv-disk", "/kv"])
        found = model_configs(given, given.server_config())
        return [each.engine.disk and each.engine.disk.path for each in found]

    assert folders("quire-demo") == ["/kv"]
    assert folders("a=quire-demo", "org/b=quire-demo") == ["/kv/a", "/kv/org--b"]


def test_the_embedded_model_may_be_named() -> None:
    from quire.cli.model_configs import model_configs

    given = parse(["serve", "quire-demo", "small=quire-demo", "other="])
    found = model_configs(given, given.server_config())
    assert [each.name for each in found] == ["quire-demo", "small", "other"]
    assert {each.engine.model for each in found} == {str(MODEL_DIR)}


def test_what_a_command_needs_may_come_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["cache"])
    assert "required: --kv-disk" in capsys.readouterr().err
    monkeypatch.setenv("QUIRE_KV_DISK", "/x")
    assert parse(["cache"]).kv_disk == Path("/x")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.command)
def test_every_option_says_what_it_is(command: type[Command]) -> None:
    for option in command.options():
        assert option.help or option.flag.after_dashes, option.name


def test_the_page_of_settings_is_made_from_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == reference(), "python -m quire.cli.reference > docs/settings.md"
    rows = [line.replace(r"\|", "") for line in page.read_text().splitlines() if line[:1] == "|"]
    assert [row for row in rows if row.count("|") != 3] == []


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "lowest level that is logged; default: info" in text
    assert "elements per scale in the uniform scheme; default: 64" in text
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


@pytest.mark.parametrize(
    ("argv", "variable", "file", "place"),
    [
        (("--kv-memory", "1GB"), None, None, "--kv-memory"),
        ((), "1GB", None, "QUIRE_KV_MEMORY"),
        ((), None, "[serve]\nkv-memory = '1GB'", "{file}: kv-memory"),
        ((), None, "[[models]]\nname = 'a'\nkv-memory = '1GB'", "{file}: kv-memory"),
        ((), None, None, "--kv-memory"),
    ],
)
def test_what_the_engine_refuses_is_named_as_it_was_set(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: tuple[str, ...],
    variable: str | None,
    file: str | None,
    place: str,
) -> None:
    def refuse(self: ServeCommand) -> int:
        raise NoRoom("only 1 MB is free", setting="kv_memory")

    monkeypatch.setattr(ServeCommand, "run", refuse)
    if variable is not None:
        monkeypatch.setenv("QUIRE_KV_MEMORY", variable)
    config = tmp_path / "config.toml"
    config.write_text(file or "")
    with pytest.raises(QuireError) as refused:
        run(["serve", "--config", str(config), *argv])
    assert str(refused.value) == f"{place.format(file=config)}: only 1 MB is free"
