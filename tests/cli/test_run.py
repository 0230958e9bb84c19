"""`quire run`, `quire search` and short names, against real servers on loopback."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from quire.cli import main, search
from quire.cli.commands import parse
from quire.cli.model_configs import model_configs
from quire.cli.served import Server, ServerError
from quire.cli.server_options import ServerOptions
from quire.cli.short_names import resolve, short_names, suggestion
from quire.core.config import ServerConfig
from quire.core.errors import QuireError
from quire.demo import MODEL_DIR
from tests.api.conftest import HTTP, Serve, Served


def run(monkeypatch: pytest.MonkeyPatch, served: Served, piped: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    return main(["run", "--url", served.url, "quire-demo", *arguments])


def prompt(served: Served) -> str:
    (request,) = served.engine.requests
    return served.tokenizer.decode(list(request.prompt))


def test_one_answer_to_a_prompt_and_what_is_piped_in(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Looks good.")
    assert run(monkeypatch, served, "+ a line\n", "Review", "this", "--system", "Be brief.") == 0
    assert capsys.readouterr().out == "Looks good.\n"
    asked = prompt(served)
    assert "Review this\n\n+ a line" in asked
    assert "Be brief." in asked


def test_piped_text_alone_is_the_question(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("Yes.")
    assert run(monkeypatch, served, "Is it?\nReally?\n") == 0
    assert "Is it?\nReally?" in prompt(served)


def test_thoughts_do_not_go_down_a_pipe(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("<|channel>thought\nLet me see.<channel|>It is four.")
    assert run(monkeypatch, served, "", "2+2?") == 0
    assert capsys.readouterr().out == "It is four.\n"


def test_nothing_to_answer_is_an_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, serve("Yes."), "\n") == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_a_preset_is_asked_by_its_name_and_options_stand_anywhere(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("No fault.", config=ServerConfig(also_named=("reviewer",)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("+ a line"))
    asked = ["run", "reviewer", "--url", served.url, "Review", "--max-tokens", "9", "this"]
    assert main(asked) == 0
    assert capsys.readouterr().out == "No fault.\n"
    assert "Review this\n\n+ a line" in prompt(served)
    assert main(["run", "reviwer", "--url", served.url, "Review this"]) == 2
    assert "it serves quire-demo" in capsys.readouterr().err


def test_a_server_that_is_named_must_have_the_model(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Yes.")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["run", "--url", served.url, "gemma4:26b", "Hi"]) == 2
    assert "does not serve 'gemma4:26b'; it serves quire-demo" in capsys.readouterr().err


def test_a_server_is_started_where_none_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = Server.models

    def models(server: Server) -> list[dict[str, Any]]:
        if server.url.endswith(":8000"):  # this machine may run one there
            raise ServerError("nobody listens")
        return listed(server)

    monkeypatch.setattr(Server, "models", models)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["run", "quire-demo", "What is 27 plus 45?"]) == 0
    assert "72" in capfd.readouterr().out


def test_short_names_come_from_the_package_and_from_a_file(home: Path) -> None:
    assert resolve("gemma4:26b") == "mlx-community/gemma-4-26b-a4b-it-4bit"
    own = home / "quire" / "names.toml"
    own.parent.mkdir()
    own.write_text('"gemma4:26b" = "me/mine"\nsmall = "quire-demo"\n')
    assert resolve("gemma4:26b") == "me/mine"
    assert resolve("small") == str(MODEL_DIR)
    assert resolve("org/name") == "org/name"
    assert resolve(str(home)) == str(home)
    own.write_text("small = 3\n")
    with pytest.raises(QuireError, match=r"names\.toml: 'small' must be"):
        short_names()


def test_every_short_name_stands_for_a_repository() -> None:
    for name, place in short_names().items():
        assert place.count("/") == 1, name
        assert "/" not in name


def test_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", "gema4:26b", "Hi"], ["serve", "gema4:26b"], ["pull", "gema4:26b"]):
        assert main(command) != 0
        assert "did you mean gemma4:26b?" in capsys.readouterr().err


def test_serve_knows_short_names_and_keeps_them_as_names() -> None:
    options = parse(["serve", "gemma4:26b"])
    assert isinstance(options, ServerOptions)
    (config,) = model_configs(options, options.server_config())
    assert config.names == ("gemma4:26b",)
    assert config.engine.model == "mlx-community/gemma-4-26b-a4b-it-4bit"


@contextmanager
def hub(models: list[dict[str, object]]) -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    """Yield a hub that lists models, and the queries that it got."""
    queries: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            queries.append(parse_qs(urlsplit(self.path).query))
            body = json.dumps(models).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", queries
        server.shutdown()


def test_search_lists_short_names_and_the_hub(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models: list[dict[str, object]] = [
        {"id": "org/gemma-few", "downloads": 3},
        {"id": "org/gemma-many", "downloads": 4000},
    ]
    with hub(models) as (url, queries):
        api = search.hub_api()
        monkeypatch.setattr(api, "endpoint", url)
        monkeypatch.setattr(search, "hub_api", lambda: api)
        assert main(["search", "gemma", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [each["name"] for each in found]
    assert names.index("gemma4:26b") < names.index("org/gemma-many") < names.index("org/gemma-few")
    assert all(query["search"] == ["gemma"] for query in queries)


def test_search_without_words_asks_no_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search"]) == 0
    assert "gemma4:26b" in capsys.readouterr().out


def test_search_without_a_hub_lists_short_names_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = search.hub_api()
    monkeypatch.setattr(api, "endpoint", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(search, "hub_api", lambda: api)
    monkeypatch.setattr(api, "list_models", None)  # which would retry
    assert main(["search", "gemma4"]) == 0
    said = capsys.readouterr()
    assert "gemma4:26b" in said.out
    assert len(said.err.splitlines()) == 1
    assert "the hub cannot be reached" in said.err


def test_a_known_id_that_is_not_here_is_not_suggested_for_itself() -> None:
    assert suggestion(resolve("gemma4:26b")) == ""
    assert "gemma-4-26b-a4b-it-4bit?" in suggestion("mlx-community/gemma-4-26b-a4b-it-4bi")


def test_a_preset_is_a_name_with_its_system_message_and_sampling(
    home: Path,
) -> None:
    file = home / "quire" / "config.toml"
    file.parent.mkdir()
    file.write_text(
        '[[models]]\nname = "pirate"\nmodel = "quire-demo"\nsystem = "Talk like a pirate."\n'
        "temperature = 0.3\n"
    )
    options = parse(["serve"])
    assert isinstance(options, ServerOptions)
    (config,) = model_configs(options, options.server_config())
    assert config.serving.default_system == "Talk like a pirate."
    assert config.serving.sampling_overrides == {"temperature": 0.3}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_default_system_message_yields_to_the_client_s(serve: Serve, role: str) -> None:
    served = serve("Arr.", config=ServerConfig(default_system="Talk like a pirate."))
    user = {"role": "user", "content": "Hi."}
    for messages in ([user], [{"role": role, "content": "Be brief."}, user]):
        body = {"model": "quire-demo", "messages": messages}
        assert HTTP.post(f"{served.url}/v1/chat/completions", json=body).status_code == 200
    one, two = (served.tokenizer.decode(list(each.prompt)) for each in served.engine.requests)
    assert "Talk like a pirate." in one
    assert "pirate" not in two
    assert "Be brief." in two
