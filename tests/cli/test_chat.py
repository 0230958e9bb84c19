"""`quire chat` through a pipe, against a real server on loopback."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from quire.api.app import build_app
from quire.cli import conversation, main
from quire.cli.chat_terminal import help_text, history_file, kept_file, typed_lines
from quire.cli.conversation import Chat, ChatError
from quire.cli.own_server import own_server
from quire.cli.served import Server
from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.core.messages import Progress
from quire.core.request import Failure, Request
from quire.demo import MODEL_DIR
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve, Served
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import one_model, serving, slow_models
from tests.support.waiting import HANG_S, wait_until

CALL = '<|tool_call>call:get_weather{city:<|"|>Tokyo<|"|>}<tool_call|>'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def chat(monkeypatch: pytest.MonkeyPatch, served: Served, lines: list[str], *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", "--url", served.url, *options])


def prompts(served: Served) -> list[str]:
    return [served.tokenizer.decode(list(request.prompt)) for request in served.engine.requests]


def test_turns_are_remembered_until_reset(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Hello there.")
    assert chat(monkeypatch, served, ["first", "second", "/reset", "third", "/exit", "never"]) == 0
    assert capsys.readouterr().out == "Hello there.\n" * 3
    one, two, three = prompts(served)
    assert "first" in one
    assert all(word in two for word in ("first", "Hello there.", "second"))
    assert "third" in three
    assert "first" not in three


def test_the_system_message_starts_anew(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("Hello there.")
    lines = ["first", "/system Talk like a pirate.", "second"]
    assert chat(monkeypatch, served, lines, "--system", "Be brief.") == 0
    one, two = prompts(served)
    assert "Be brief." in one
    assert "Talk like a pirate." in two
    assert "Be brief." not in two
    assert "first" not in two


def test_thoughts_are_shown_but_not_sent_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("<|channel>thought\nLet me see.<channel|>It is four.")
    assert chat(monkeypatch, served, ["2+2?", "again"]) == 0
    out = capsys.readouterr().out
    assert "Let me see." in out
    assert out.index("Let me see.") < out.index("It is four.")
    assert "Let me see." not in prompts(served)[1]


def test_calls_are_shown_and_their_results_sent(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def script(request: Request) -> Script:
        first = len(served.engine.requests) == 1
        return Script(served.ids(CALL if first else "It rains."))

    served = serve(script)
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    lines = ["Weather in Tokyo?", "heavy rain"]
    assert chat(monkeypatch, served, lines, "--tools", str(tools)) == 0
    out = capsys.readouterr().out
    name, _, arguments = out.splitlines()[-2].partition("(")
    assert name == "get_weather"
    assert json.loads(arguments.removesuffix(")")) == {"city": "Tokyo"}
    assert out.endswith("It rains.\n")
    assert "heavy rain" in prompts(served)[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not valid JSON"), ("{}", "must hold a list of tools")],
)
def test_a_file_that_holds_no_tools_is_named(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    said: str,
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(text)
    assert chat(monkeypatch, serve("Hello."), [], "--tools", str(tools)) == 2
    assert f"--tools: {tools}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "Hello there."])
def test_a_failed_turn_is_told_and_kept_as_far_as_it_came(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    def script(request: Request) -> Script:
        first = len(served.engine.requests) == 1
        failure = Failure("out of paper") if first else None
        return Script(served.ids(text if first else "Once more."), error=failure)

    served = serve(script)
    assert chat(monkeypatch, served, ["first", "second"]) == 1
    captured = capsys.readouterr()
    assert "out of paper" in captured.err
    assert ("the answer so far is kept" in captured.err) == bool(text)
    assert captured.out.endswith("Once more.\n")
    later = prompts(served)[1]
    assert ("first" in later) == bool(text)
    assert text in later


def test_a_line_that_is_no_text_is_told_and_not_sent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Hello there.")
    broken = b"caf\xe9".decode(errors="surrogateescape")
    assert chat(monkeypatch, served, [broken, "second"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "quire chat: a line is not UTF-8 and was not sent\n"
    assert captured.out == "Hello there.\n"
    (prompt,) = prompts(served)
    assert "second" in prompt


def test_a_refused_request_is_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Hello there.")
    assert chat(monkeypatch, served, ["first"], "--temperature", "-1") == 1
    error = capsys.readouterr().err
    assert "HTTP 400" in error
    assert "temperature" in error


@pytest.mark.parametrize("width", [50, 79])
def test_help_fits_the_terminal(width: int) -> None:
    lines = help_text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.startswith("/file")]
    assert "`quire chat --resume`" in help_text(width)


def test_an_unknown_command_is_named_and_not_sent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Hello there.")
    assert chat(monkeypatch, served, ["/rest", " /rest is sent", "/quit", "never"]) == 0
    assert "no such command: /rest; /? lists them" in capsys.readouterr().err.splitlines()[-1]
    assert len(served.engine.requests) == 1


def test_no_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert (
        "no server answers at http://127.0.0.1:9 (Connection refused): start `quire serve`"
        in capsys.readouterr().err
    )


def test_a_model_that_cannot_be_served_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "did not start" in error
    assert "config.json" in error


def test_interrupting_stops_the_answer_and_keeps_the_chat(serve: Serve) -> None:
    served = serve(lambda _: Script(served.ids("Hello there."), silent=True))
    child = subprocess.Popen(
        [sys.executable, "-m", "quire", "chat", "--url", served.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background with Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        waiting = psutil.Process(child.pid)
        out = ""
        for turn in (1, 2):
            child.stdin.write(f"turn {turn}\n")
            child.stdin.flush()
            while out.count("Hello") < turn:
                more = child.stdout.read(1)
                assert more, out
                out += more
            # It waits for more: Python drops what a signal raises in a destructor.
            wait_until(lambda: waiting.status() == psutil.STATUS_SLEEPING)
            child.send_signal(signal.SIGINT)
            wait_until(lambda: served.engine.tickets[-1].aborted)
        out += child.communicate("/exit\n", timeout=HANG_S)[0]
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0
    assert out.count("(stopped)") == 2
    assert "turn 1" in prompts(served)[1]


def test_a_file_that_cannot_be_used_is_named(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    served = serve("Hello there.")
    info = replace(served.engine.info, modalities=("text", "image"))
    engine = ScriptedEngine(info, lambda _: Script(served.ids("Fine.")))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    config = ServerConfig()
    with serving(build_app(one_model(engine, "quire-demo", config), config)) as url:
        lines = ["Hi.", f"/file {broken}", "What is it?"]
        said = chat(monkeypatch, replace(served, url=url), lines, "--system", "Be brief.")
    assert said == 1
    assert "quire chat: HTTP 400: broken.png cannot be used: it " in capsys.readouterr().err


def test_a_stopped_answer_does_not_show_the_figures_of_the_one_before(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve("Hello there.")
    console = Console(file=io.StringIO())
    with httpx.Client(verify=False, timeout=HANG_S) as client:
        talk = Chat(client, Server(served.url), {"model": "quire-demo"}, console)
        talk.messages.append({"role": "user", "content": "Hi."})
        talk.answer()
        assert talk.usage is not None

        def interrupted(delta: object, answer: object, shown: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(talk, "_show", interrupted)
        talk.answer()
        assert talk.usage is None


def test_an_adapter_belongs_to_a_server_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--adapter", "lora"]) == 2
    assert "--adapter needs --model" in capsys.readouterr().err


def test_its_server_takes_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[object]()
    monkeypatch.setattr(
        ssl.SSLContext, "load_verify_locations", lambda *_, **files: read.append(files)
    )
    with pytest.raises(ChatError, match=r"no adapter_config\.json"), own_server("", str(tmp_path)):
        pass
    assert not read, "certificates, by each question whether it is ready"


def test_its_server_ends_with_a_chat_that_is_killed(tmp_path: Path) -> None:
    program = (
        "from quire.cli.own_server import own_server\n"
        "with own_server(''): print('ready', flush=True); input()"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as chat:
        assert chat.stdout is not None
        assert chat.stdout.readline() == b"ready\n"
        processes = psutil.Process(chat.pid).children(recursive=True)
        assert len(processes) > 1, "the server and its engine"
        chat.kill()
    wait_until(lambda: not any(each.is_running() for each in processes))


@pytest.mark.slow
def test_its_server_says_how_far_the_loading_is() -> None:
    told: list[Progress] = []
    with own_server("", None, told.append) as url:
        assert HTTP.get(f"{url}/health").status_code == 200
    assert told[-1].stage == "weights"
    assert told[-1].done == told[-1].total > 1e6


def test_pictures_models_figures_and_saving(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    served = serve("Hello there.")
    saved, sound = tmp_path / "said.json", tmp_path / "sound.mp3"
    sound.write_bytes(b"ID3")
    lines = ["/stats", "/model", "/model quire-demo", "/model other", "first", "/stats"]
    lines += [f"/save {saved}", f"/image {tmp_path / 'none.png'}", f"/file {sound}", "/?"]
    assert chat(monkeypatch, served, lines, "--system", "Be brief.") == 0
    notes = capsys.readouterr().err
    assert "there is no answer yet" in notes
    assert "* quire-demo" in notes
    assert "no model is called 'other'; the models are: quire-demo" in notes
    assert re.search(r"prompt \d+ tokens, 0 of them cached; .* answer \d+ tokens", notes)
    assert "none.png: No such file or directory" in notes
    assert "Errno" not in notes
    assert "/file: quire-demo takes no audio, only text" in notes
    assert "/file FILE" in notes
    messages = json.loads(saved.read_text())["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"] == "Hello there."


def test_a_paste_is_one_message_and_history_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    up = "\x1b[A"
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("\x1b[200~one\ntwo\nthree\x1b[201~\r")
        assert typed_lines()("> ") == "one\ntwo\nthree"
        keys.send_text("next\r")
        assert typed_lines()("> ") == "next"
        keys.send_text(f"{up}\r")
        assert typed_lines()("> ") == "next"  # another session, as after a restart
        read = typed_lines()
        keys.send_text("not this\x03that\r")
        assert read("> ") == "that"  # Ctrl-C clears a line that holds text
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            read("> ")
    assert history_file().stat().st_mode & 0o077 == 0


def test_a_conversation_is_kept_and_resumed(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    served = serve("Hello there.")
    assert chat(monkeypatch, served, ["not kept: a pipe"]) == 0
    assert chat(monkeypatch, served, [], "--resume") == 2
    assert "no conversation has been kept yet" in capsys.readouterr().err
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("first\r/exit\r")
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, fileno=lambda: -1))
        assert main(["chat", "--url", served.url, "--system", "Be brief."]) == 0
    assert kept_file().stat().st_mode & 0o077 == 0
    capsys.readouterr()
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("second\r/exit\r")
        assert main(["chat", "--url", served.url, "--resume"]) == 0
    shown = capsys.readouterr()
    assert "continuing after 1 message of yours" in shown.err
    assert "> first\nHello there.\n" in shown.out
    last = prompts(served)[-1]
    assert all(each in last for each in ("Be brief.", "first", "Hello there.", "second"))


def test_ctrl_c_at_the_prompt_leaves(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Hello there.")

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert chat(monkeypatch, served, []) == 0
    assert not served.engine.requests


def test_a_terminal_shows_markdown(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(conversation, "time", clock)

    def script(_: Request) -> Script:
        clock.now += 0.5
        return Script(served.ids("Some **bold** words."), group=100)

    served = serve(script)
    out = io.StringIO()
    with httpx.Client(verify=False, timeout=HANG_S) as client:
        console = Console(file=out, force_terminal=True, width=80)
        talk = Chat(client, Server(served.url), {"model": "quire-demo"}, console)
        talk.messages.append({"role": "user", "content": "Hi"})
        assert talk.answer().text == "Some **bold** words."
    assert "**" not in out.getvalue()
    assert "\x1b[1mbold" in out.getvalue()
    assert talk.usage is not None
    assert talk.usage.generated > 1
    assert talk.usage.first_s == 0.5


def test_an_answer_that_waits_says_how_far_its_model_is(tokenizer: Tokenizer) -> None:
    info = ModelInfo(str(MODEL_DIR), "gemma4", 4096, 4096, "float32", "cpu", 1 << 20)
    engine = ScriptedEngine(info, lambda _: Script(tuple(tokenizer.encode("Hello there."))))
    opening = threading.Event()

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "loading b: 40% of" in text:
                opening.set()
            return super().write(text)

    app = build_app(slow_models(engine, opening), ServerConfig())
    with serving(app) as url, httpx.Client(verify=False, timeout=HANG_S) as client:
        console = Console(file=Screen(), force_terminal=True, width=80)
        talk = Chat(client, Server(url), {"model": "b"}, console)
        talk.messages.append({"role": "user", "content": "Hi"})
        assert talk.answer().text == "Hello there."
        assert Server(url).model("b")["progress"] is None
    assert opening.is_set()
