"""`quire bench` against a real server on loopback."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire.api.app import build_app
from quire.cli import bench, main
from quire.cli.bench_levels import Level, Spread, show, summarise
from quire.cli.load import Timings
from quire.cli.served import Server
from quire.core.config import ServerConfig
from quire.core.request import Failure, Request
from tests.api.conftest import Serve
from tests.support.scripted_engine import Script
from tests.support.server import serving, slow_models

QUICK = ["--prompt-tokens", "40", "--warmup", "1", "--timeout", "120"]


def test_levels_are_measured_and_written(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_flight: list[int] = []
    four_at_once = threading.Event()

    def script(request: Request) -> Script:
        in_flight.append(sum(not ticket.ended for ticket in served.engine.tickets))
        if in_flight[-1] == 4:
            four_at_once.set()
        first_level = len(in_flight) <= 3 + 8  # behind two probes and the warm-up
        held = None if first_level else four_at_once
        return Script(tuple(range(300, 310)), held=held, delay_s=0.01, cached_tokens=4)

    served = serve(script)
    out = tmp_path / "out.json"
    command = ["bench", "--url", served.url, "--concurrency", "1,4", "--requests", "8", "--json"]
    assert main([*command, str(out), "--max-tokens", "6", "--api-key", "secret", *QUICK]) == 0
    text = out.read_text()
    assert "secret" not in text
    report = json.loads(text)
    one, four = report["levels"]
    for level in (one, four):
        assert level["requests"] == 8
        assert level["failed"] == 0
        assert level["completion_tokens"] == 8 * 6
        assert level["cached_tokens"] == 8 * 4
        assert level["tokens_from_usage"]
        assert level["ttft_ms"]["median"] >= 10
    # A closed loop: the next request goes out when one has been answered.
    assert max(in_flight[-16:-8]) == 1
    assert max(in_flight[-8:]) == 4
    assert "tokens/s" in capsys.readouterr().out


def test_prompts_have_the_length_asked_for_and_differ(serve: Serve) -> None:
    served = serve("Hello there.")
    command = ["bench", "--url", served.url, "--concurrency", "2", "--requests", "4"]
    assert main([*command, "--warmup", "0", "--prompt-tokens", "60"]) == 0
    measured = served.engine.requests[2:]  # the first two are the probes
    assert len({request.prompt for request in measured}) == 4
    assert all(50 <= len(request.prompt) <= 70 for request in measured)
    assert all(request.sampling.temperature == 0 for request in measured)


def test_a_prompt_file_and_the_legacy_endpoint(serve: Serve, tmp_path: Path) -> None:
    served = serve("Hello there.")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time")
    command = ["bench", "--url", served.url + "/v1", "--endpoint", "completions", "--warmup", "0"]
    assert main([*command, "--prompt-file", str(prompt), "--concurrency", "1"]) == 0
    assert all(served.ids("Once upon a time")[-3:] == r.prompt[-3:] for r in served.engine.requests)


def test_failed_requests_are_named_and_fail_the_run(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: Request) -> Script:
        # Probes and the warm-up ask for one token or go first; the others fail half-way.
        broken = Failure("the engine lost a page") if len(served.engine.requests) > 3 else None
        return Script((300, 301, 302), error=broken)

    served = serve(script)
    assert main(["bench", "--url", served.url, "--concurrency", "2", *QUICK]) == 1
    told = capsys.readouterr().out
    assert "8 of 8 requests at 2 streams failed" in told
    assert "lost a page" in told


def test_a_model_that_is_not_served_is_reported(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("Hello there.")
    assert main(["bench", "--url", served.url, "--model", "other", *QUICK]) == 2
    error = capsys.readouterr().err
    assert "HTTP 404" in error
    assert "quire-demo" in error


def test_a_model_is_loaded_before_it_is_measured(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = threading.Event()
    opening.set()
    served = serve("Fine")
    models = slow_models(served.engine, opening)
    loaded: list[bool] = []

    def load(server: Server, name: str) -> dict[str, Any]:
        loaded.append(not served.engine.requests)
        return server.load(name)

    monkeypatch.setattr(bench, "loaded", load)
    with serving(build_app(models, ServerConfig())) as url:
        assert main(["bench", "--url", url, "--model", "b", "--concurrency", "1", *QUICK]) == 0
        states = [each["state"] for each in Server(url).models()]
    assert loaded == [True]  # before any request
    assert states == ["unloaded", "loaded"]


def test_a_server_that_never_answers_is_reported(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(lambda _: Script(silent=True))
    assert main(["bench", "--url", served.url, "--timeout", "0.3"]) == 2
    assert "no complete answer within 0.3 s" in capsys.readouterr().err


def test_no_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["bench", "--url", url, "--timeout", "5"]) == 2
        told = f"no server answers at {url} (Connection refused): start `quire serve`"
        assert told in capsys.readouterr().err
        assert main(["bench", "--url", url, "--model", "m", "--timeout", "5"]) == 2
        assert told in capsys.readouterr().err


def test_a_url_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "localhost:8000"]) == 2
    assert "not an http" in capsys.readouterr().err


def test_gaps_of_all_answers_that_went_well_are_pooled() -> None:
    answers = [
        Timings(1.0, 3.0, (1.5, 1.75, 3.0), completion_tokens=4),
        Timings(2.0, 5.0, (4.0, 4.5), completion_tokens=2),
        Timings(2.0, 4.0, (2.5, 3.5), error="gone"),
    ]
    level = summarise(answers, 2, cpu_s=1.0)
    assert level.ttft_ms == Spread(median=500, p95=2000, max=2000)
    assert level.itl_ms == Spread(median=500, p95=1250, max=1250)
    assert (level.requests, level.failed, level.completion_tokens, level.events) == (3, 1, 6, 5)
    assert (level.wall_s, level.tokens_per_s, level.client_cpu) == (4, 1.5, 0.25)


def test_percentiles_are_nearest_rank() -> None:
    spread = Spread.of([n / 1000 for n in range(101)])
    assert spread == Spread(median=50, p95=95, max=100)
    assert Spread.of([]) is None


SPREAD = Spread(12_345.6, 123_456.7, 1_234_567.8)
LEVEL = Level(64, 256, 0, 1.0, 12_345.67, 1.0, 1, 1, 0, 1, True, SPREAD, SPREAD, 0.1, ())
FIGURES = ("64", "256/256", "12,345.7", "12,345.6", "123,456.7", "1,234,567.8")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_figure_is_cut_off(width: int, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    show([LEVEL, LEVEL], "a title", console)
    text = out.getvalue()
    assert all(text.count(figure) >= 2 for figure in FIGURES)
    assert "TTFT" in text
    assert "ms" in text
    lines = text.splitlines()
    if terminal:
        assert max(map(len, lines)) <= width
    else:
        assert lines[1].split()[3] == "TTFT_p50_ms"
        assert lines[2].split() == [*FIGURES[:3], *FIGURES[3:], *FIGURES[3:]]


def test_ctrl_c_prints_what_was_measured(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Request) -> Script:
        if len(served.engine.requests) <= 3 + 4:  # two probes, the warm-up, the first level
            return Script(tuple(range(300, 310)))
        if len(served.engine.requests) <= 3 + 4 + 3:  # three answers of the second
            return Script(tuple(range(300, 310)))
        if len(served.engine.requests) == 3 + 4 + 4:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        return Script(silent=True)

    served = serve(script)
    command = ["bench", "--url", served.url, "--concurrency", "1,2", "--requests", "4"]
    assert main([*command, "--max-tokens", "6", *QUICK]) == 130
    printed = capsys.readouterr()
    told = "stopped after 1 of 2 levels and 3 of the next level's 4 requests"
    assert told in " ".join(printed.err.split())
    assert "4/4" in printed.out
    assert "3/3" in printed.out
