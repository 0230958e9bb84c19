"""`quire serve` turns its options into configurations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.api.chat.endpoint import ChatRequest
from quire.api.shared.schema import parse as parse_body
from quire.cli.commands import parse
from quire.cli.model_configs import model_configs
from quire.cli.model_options import ModelOptions, SamplingOptions
from quire.cli.serve import ServeCommand
from quire.cli.server_options import ServerOptions
from quire.core.config import KeyLimits, ServerConfig
from quire.core.errors import QuireError, RequestError
from quire.core.request import SamplingParams
from quire.core.sampling_params import LIMITS
from quire.demo import MODEL_DIR
from quire.media.kinds import limits_of
from quire.serving.sampling_defaults import overridden

ASK = {"messages": [{"role": "user", "content": "Hi."}]}


def config(*arguments: str) -> ServerConfig:
    options = parse(["serve", *arguments])
    assert isinstance(options, ServerOptions)
    return model_configs(options, options.server_config())[0].serving


def test_by_default_the_key_is_the_process_own() -> None:
    assert config().signing_key is None
    assert config().stored_responses == ServerConfig().stored_responses


def test_a_signing_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert config("--signing-key-file", str(file)).signing_key == "secret"
    assert config("--stored-responses", "5").stored_responses == 5


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="--signing-key-file"):
        config("--signing-key-file", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(QuireError, match="empty"):
        config("--signing-key-file", str(tmp_path / "empty"))


def test_the_help_of_each_sampling_flag_says_what_it_does() -> None:
    said = [str(each.description) for each in SamplingOptions.model_fields.values()]
    assert len(set(said)) == len(said)


def test_the_engine_learns_of_an_adapter() -> None:
    assert ModelOptions().engine_config("m").adapter is None
    given = ModelOptions(adapter=("lora", "a=one", "b=org/two")).engine_config("m")
    assert given.adapter == "lora"
    assert given.adapters == (("a", "one"), ("b", "org/two"))
    with pytest.raises(QuireError, match="only one adapter can be merged"):
        ModelOptions(adapter=("one", "two")).engine_config("m")
    with pytest.raises(QuireError, match="NAME=FOLDER"):
        ModelOptions(adapter=("a=",)).engine_config("m")


def test_a_draft_model_is_named_with_the_way_to_speculate() -> None:
    given = ModelOptions(speculate="draft=quire-demo").engine_config("m")
    assert (given.speculate, given.draft_model) == ("draft", str(MODEL_DIR))
    given = ModelOptions(speculate="mtp").engine_config("m")
    assert (given.speculate, given.draft_model) == ("mtp", None)
    for wrong in ("draft", "draft=", "mtp=x", "eagle"):
        with pytest.raises(ValueError, match="draft=MODEL"):
            ModelOptions(speculate=wrong)
    with pytest.raises(QuireError, match="no model is called 'quire-dem'"):
        ModelOptions(speculate="draft=quire-dem").engine_config("m")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("--stop-on-loop", "2"),
            "--stop-on-loop: must be 0 (never) or at least 3",
        ),
        (("--max-image-pixels", "9" * 20), "at most 1,000,000,000,000,000"),
        (("--max-audio-bytes", "1e30TB"), "at most 1,000,000,000,000,000,000"),
        (("--max-video-seconds", "1e308"), "at most 1,000,000,000"),
        (("--engine-timeout", "1e-300"), "at least 1"),
        (("--restarts", "-1"), "at least 0"),
        (("--media-folder", "a" * 5000), "too long for a path"),
        (("--adapter", "a" * 5000), "too long for a path"),
        (("--port", "65536"), "at most 65,535"),
        (("--host", ""), "must not be empty"),
        (("--kv-memory", "inf"), "number of bytes"),
        (("--kv-memory", "8PB"), "number of bytes"),
        (("--request-timeout", "0"), "more than 0"),
        (("--step-ms", "nan"), "finite number"),
        (("--max-messages", "0"), "at least 1"),
        (("--max-images", "-1"), "at least 1"),
        (("--max-image-pixels", "1e6"), "whole number"),
        (("--max-image-bytes", "many"), "number of bytes"),
        (("--otlp-endpoint", "localhost:4318"), "not a URL"),
    ],
)
def test_values_that_cannot_be_are_refused(
    options: tuple[str, str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        config(*options)
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000", 1000), ("8G", 8 * 10**9), ("8 GB", 8 * 10**9), ("1.5kib", 1536), ("2MiB", 2 << 20)],
)
def test_numbers_of_bytes(text: str, count: int) -> None:
    assert config("--max-body", text).max_body_bytes == count


def test_who_gets_traces_is_said_by_an_option_or_else_by_the_usual_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert config().otlp_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert config().otlp_endpoint == "http://collector:4318"
    assert config("--otlp-endpoint", "https://other").otlp_endpoint == "https://other"


def test_a_folder_is_served_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert config(".").served_name == "some-model"
    assert config(".", "--served-name", "other").served_name == "other"


def test_keys_come_from_options_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("two\nthree\n")
    monkeypatch.setenv("QUIRE_API_KEY", "four, five,")
    keys = config("--api-key", "one", "--api-key-file", str(tmp_path / "keys")).api_keys
    assert keys == ("one", "two", "three", "four", "five")


def test_keys_of_a_file_have_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo share=2.5 tokens-per-minute=1000\n\nthree requests-per-minute=5\n")
    given = config("--api-key-file", str(file), "--requests-per-minute", "60")
    assert given.default_limits == KeyLimits(60)
    assert given.key_limits == {
        "one": KeyLimits(60),
        "two": KeyLimits(60, 1000, share=2.5),
        "three": KeyLimits(5),
    }
    for line in ("one two", "one share=0", "one requests-per-minute=x", "one other=1"):
        file.write_text(line)
        with pytest.raises(QuireError, match="a key can be followed by limits"):
            config("--api-key-file", str(file))


@pytest.mark.parametrize("written", ["::1", "[::1]"])
def test_an_address_to_bind_may_be_written_as_in_a_url(written: str) -> None:
    assert config("--host", written).host == "::1"


@pytest.mark.parametrize(("path", "size"), [("", 0), ("/" + "q" * 200, 201)])
def test_the_path_of_a_unix_socket_has_a_length_that_the_system_takes(
    path: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config("--host", "unix:/run/quire.sock").host == "unix:/run/quire.sock"
    with pytest.raises(SystemExit):
        config("--host", f"unix:{path}")
    shown = capsys.readouterr().err
    assert "--host" in shown
    assert f"a path of {size} bytes; that of a Unix socket has 1 to 10" in shown


def test_origins_are_such_as_browsers_send() -> None:
    given = ("http://LOCALHOST:3000/", "tauri://localhost", "app://obsidian.md", "null")
    named = config(*(each for origin in given for each in ("--cors-origin", origin)))
    assert named.cors_origins == (
        *("http://localhost:3000", "tauri://localhost"),
        *("app://obsidian.md", "null"),
    )
    assert config("--cors-origin", "*").cors_origins == ("*",)


@pytest.mark.parametrize("text", ["localhost:3000", "chrome-extension://*", "http://a.example/b"])
def test_what_no_browser_sends_is_no_origin(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config("--cors-origin", text)
    assert f"{text!r} is not an origin" in capsys.readouterr().err


def test_by_default_no_image_is_fetched_and_their_limits_are_the_settings() -> None:
    given, default = config(), ServerConfig()
    assert (given.allow_media_hosts, given.media_folders) == (False, ())
    assert limits_of(given.media_limits) == limits_of(default.media_limits)


def test_limits_of_images() -> None:
    given = config("--max-images", "3", "--max-image-bytes", "1MiB", "--max-image-pixels", "999")
    limits = limits_of(given.media_limits)["image"]
    assert (limits.files, limits.each.bytes, limits.each.pixels) == (3, 1 << 20, 999)


def test_where_images_may_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path)
    folders = ("--media-folder", "one", "--media-folder", str(tmp_path / "two"))
    given = config("--allow-media-hosts", "--media-timeout", "2.5", *folders)
    assert given.allow_media_hosts
    assert given.media_timeout_s == 2.5
    here = tmp_path.resolve()
    assert given.media_folders == (str(here / "one"), str(here / "two"))


def test_a_media_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(QuireError, match=r"--media-folder: '.*' is not a folder"):
            config("--media-folder", str(tmp_path / name))


def test_without_mlx_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()  # found first, and without `mlx.core`
    for command in (("serve", "--port", "0"), ("eval-kv",)):
        ran = subprocess.run(
            [sys.executable, "-m", "quire", *command],
            # A home that cannot be written to costs a line of its own.
            env={**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 1
        assert "MLX cannot be loaded" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1, ran.stderr


def test_help_needs_no_web_server() -> None:
    code = "import sys, quire.cli; sys.exit('uvicorn' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


_WHEN_STARTED = """
import sys
from quire.cli import main, serve

def start(config, *_):
    sys.exit(f"imported: {sorted({'uvicorn', 'quire.api.app'} & sys.modules.keys())}")

serve.start_engine = start
main(["serve", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "imported: []"), (("--host", "0.0.0.0", "--wrong"), "imported")],
    ids=["served", "refused"],
)
def test_the_engine_starts_before_the_http_side_is_imported(
    options: tuple[str, ...], said: str
) -> None:
    command = [sys.executable, "-c", _WHEN_STARTED, *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (said in ran.stderr) == (not options), ran.stderr


def test_defaults_of_sampling() -> None:
    assert config().sampling_defaults == "model"
    assert config().sampling_overrides == {}
    chosen = config("--sampling-defaults", "openai", "--temperature", "0.3", "--top-k", "20")
    assert chosen.sampling_defaults == "openai"
    assert chosen.sampling_overrides == {"temperature": 0.3, "top_k": 20}


def test_each_sampling_flag_becomes_a_default_of_requests() -> None:
    flags = SamplingOptions.model_fields.keys() - {"sampling_defaults"}
    values = {name: int(LIMITS[name]["ge"]) + 1 for name in flags} | {"top_p": 0.5, "min_p": 0.5}
    asked = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    overrides = config(*asked).sampling_overrides
    assert overrides == values
    drawn = overridden(SamplingParams(), overrides)
    assert {name: getattr(drawn, name) for name in values} == values


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", (0, 2, 9), (-0.1, 3.5e38)),
        ("top_p", (0, 1), (-0.1, 1.5)),
        ("top_k", (-1, 2**31 - 1), (-2, 2**31)),
        ("min_p", (0, 1), (-0.1, 1.1)),
        ("repetition_penalty", (0.01, 10), (0, 11)),
        ("max_tokens", (1, 2**31 - 1), (0, 2**31)),
    ],
)
def test_a_default_for_requests_may_be_what_a_request_may(
    capsys: pytest.CaptureFixture[str],
    name: str,
    inside: tuple[float, ...],
    outside: tuple[float, ...],
) -> None:
    flag = f"--{name.replace('_', '-')}"
    for value in inside:
        overridden(SamplingParams(), config(f"{flag}={value}").sampling_overrides)
        parse_body(ChatRequest, {**ASK, name: value})
    for value in outside:
        with pytest.raises(SystemExit):
            config(f"{flag}={value}")
        said = capsys.readouterr().err
        assert f"argument {flag}: must be" in said
        assert f", not {value};" in said
        with pytest.raises(RequestError, match=name):
            parse_body(ChatRequest, {**ASK, name: value})


def test_replicas_are_a_number_or_auto_and_need_ray_and_one_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ServeCommand(replicas="3").replicas == 3
    assert ServeCommand(replicas="auto").replicas == "auto"
    with pytest.raises(ValueError, match="neither auto nor a number from 1"):
        ServeCommand(replicas="0")
    folder = str(MODEL_DIR)
    with pytest.raises(QuireError, match="works with one model only, and 2 are configured"):
        ServeCommand(models=[f"a={folder}", f"b={folder}"], replicas=2).run()
    monkeypatch.setattr("quire.cli.serve.find_spec", lambda name: None)
    with pytest.raises(QuireError, match=r"pip install 'quire-serve\[ray\]'"):
        ServeCommand(models=[folder], replicas=2).run()


def test_a_model_is_split_by_a_number_by_cards_or_by_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.model_options.count_cards", lambda: 4)
    parsed = parse(["serve", "m", "--tensor-parallel", "2"])
    assert isinstance(parsed, ModelOptions)
    assert parsed.engine_config("m").ranks == 2
    assert ModelOptions(tensor_parallel="auto").engine_config("m").ranks == 4
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]')
    config = ModelOptions(hosts=str(hosts)).engine_config("m")
    assert config.ranks == 2
    assert config.hosts is not None
    with pytest.raises(QuireError, match="the hosts file has 2 hosts"):
        ModelOptions(hosts=str(hosts), tensor_parallel=3).engine_config("m")


def test_a_model_is_split_by_layers_in_proportions(tmp_path: Path) -> None:
    parsed = parse(["serve", "m", "--pipeline", "3:1"])
    assert isinstance(parsed, ModelOptions)
    config = parsed.engine_config("m")
    assert (config.ranks, config.pipeline) == (2, (3, 1))
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]')
    config = ModelOptions(hosts=str(hosts), pipeline="auto").engine_config("m")
    assert (config.ranks, config.pipeline) == (2, ())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pipeline": "3"}, "proportions of two machines or more"),
        ({"pipeline": "3:0"}, "proportions of two machines or more"),
        ({"pipeline": "auto"}, "say --hosts"),
        ({"pipeline": "1:1", "tensor_parallel": 2}, "say one"),
    ],
)
def test_proportions_that_say_nothing_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises((QuireError, ValueError), match=why):
        ModelOptions(**options).engine_config("m")


@pytest.mark.parametrize(
    ("former", "name"),
    [("--allowed-hosts", "--allowed-host"), ("--cors-origins", "--cors-origin")],
)
def test_a_renamed_flag_works_with_a_warning_and_is_hidden(
    former: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "https://a.example" if "origin" in name else "a.example"
    assert config(former, value, name, value) == config(name, value, name, value)
    assert capsys.readouterr().err == f"quire: warning: {former} is now called {name}\n"
    with pytest.raises(SystemExit):
        parse(["serve", "--help"])
    shown = capsys.readouterr().out
    assert name in shown
    assert former not in shown
