"""Commands that ask a running server, or start an agent for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir
from rich.console import Console

from quire.cli import main
from quire.cli.launch import AGENTS, Place, too_short
from quire.cli.ps import listing
from quire.cli.served import Server
from quire.core.config import ServerConfig
from quire.demo import MODEL_DIR
from tests.api.conftest import Serve
from tests.support.child import Child, quire_serve

AGENT = f"""#!{sys.executable}
import json, os, sys
ours = ("ANTHROPIC_", "CLAUDE_CODE_", "OPENCODE_", "QUIRE_")
names = [n for n in os.environ if n.startswith(ours)]
print(json.dumps([sys.argv[1:], {{name: os.environ[name] for name in names}}]))
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    models = (f"left={MODEL_DIR}", f"right={MODEL_DIR}")
    folder = tmp_path_factory.mktemp("ps")
    with quire_serve(
        folder, *models, "--max-context", "4096", "--log-level", "info", "--log-format", "json"
    ) as child:
        yield child


def listed(child: Child, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["ps", "--url", child.url, "--json", *options]) == 0
    return {each["id"]: each for each in json.loads(capsys.readouterr().out)}


def test_ps_shows_what_is_loaded(child: Child, capsys: pytest.CaptureFixture[str]) -> None:
    assert {each["state"] for each in listed(child, capsys).values()} == {"unloaded"}
    loaded = listed(child, capsys, "--load", "right")["right"]
    assert loaded["state"] == "loaded"
    assert loaded["weight_bytes"] > 1e6
    assert main(["ps", "--url", child.url]) == 0
    table = capsys.readouterr().out
    assert "right" in table
    assert max(map(len, table.splitlines())) <= 80
    assert listed(child, capsys, "--unload", "right")["right"]["state"] == "unloaded"
    assert main(["ps", "--url", child.url, "--load", "middle"]) == 2
    assert "'middle' is not served here" in capsys.readouterr().err
    assert main(["ps", "--url", "http://127.0.0.1:1"]) == 2
    assert "no server answers at http://127.0.0.1:1 (Connection refused)" in capsys.readouterr().err


def test_a_missing_key_is_told_from_a_wrong_one(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(config=ServerConfig(api_keys=("right",)))
    key = tmp_path / "key"
    key.write_text("wrong")
    for command in ("ps", "chat"):
        asked = [command, "--url", served.url]
        assert main(asked) == 2
        said = capsys.readouterr().err
        assert "asks for an API key: give it by --api-key-file or QUIRE_API_KEY" in said
        assert main([*asked, "--api-key-file", str(key)]) == 2
        assert "does not know this API key" in capsys.readouterr().err
    key.write_text("right")
    assert main(["ps", "--url", served.url, "--api-key-file", str(key)]) == 0


def test_a_pinned_model_is_unloaded_by_force_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    pinned = {"id": "kept", "state": "loaded", "pinned": True, "weight_bytes": 1, "kv_bytes": 2}
    monkeypatch.setattr(Server, "models", lambda self: [pinned])
    monkeypatch.setattr(Server, "unload", lambda self, name: asked.append(name))
    assert main(["ps", "--unload", "kept"]) == 1
    assert "kept is pinned: add --force" in capsys.readouterr().err
    assert asked == []
    assert main(["ps", "--unload", "kept", "--force"]) == 0
    assert asked == ["kept"]
    assert "max KV" in capsys.readouterr().out


def test_ps_shows_every_figure_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"id": "small", "state": "loaded", "weight_bytes": 10**9, "kv_bytes": 2 * 10**9}
    Console(width=40).print(listing([{**model, "requests": 3, "pinned": True}]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["small"], ["state", "loaded"]]
    assert ["max", "KV", "2.0", "GB"] in lines
    assert ["unloaded", "in", "pinned"] in lines


def test_ps_says_why_a_model_is_not_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(listing([{"id": "small", "problem": "no config.json"}]))
    assert "small: no config.json" in capsys.readouterr().out.splitlines()


def test_every_process_logs_objects(child: Child, capsys: pytest.CaptureFixture[str]) -> None:
    listed(child, capsys, "--load", "left")
    lines = [
        json.loads(line)
        for line in child.log.read_text().splitlines()
        if not line.startswith("quire serves")
    ]
    assert all({"time", "level", "logger"} <= line.keys() for line in lines)
    assert any(
        line["logger"] == "quire.engine" and "KV budget" in line["message"] for line in lines
    )
    access = [line for line in lines if line["logger"] == "quire.access"]
    assert any(line["path"] == "/models/load" and line["status"] == 200 for line in access)


def launched(folder: Path, agent: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Starts an agent that prints its arguments and variables."""
    program = folder / agent
    program.write_text(AGENT)
    program.chmod(0o755)
    command = [sys.executable, "-m", "quire", "launch", agent, *arguments]
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )


def test_an_agent_is_not_started_with_a_model_that_is_not_served(
    child: Child, tmp_path: Path
) -> None:
    ran = launched(tmp_path, "claude", "--url", child.url, "--served-model", "middle")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "'middle' is not served here" in ran.stderr
    assert "left" in ran.stderr


@pytest.mark.parametrize(
    "agent", ["claude", *(pytest.param(n, marks=pytest.mark.slow) for n in ("codex", "opencode"))]
)
def test_an_agent_starts_with_the_server(child: Child, tmp_path: Path, agent: str) -> None:
    ran = launched(tmp_path, agent, "--url", child.url, "--", "-p", "hi")
    assert ran.returncode == 0, ran.stderr
    assert "quire: left has a context of 4,096 tokens; agents need 64,000 or more" in ran.stderr
    arguments, variables = json.loads(ran.stdout)
    assert arguments[-2:] == ["-p", "hi"]
    match agent:
        case "claude":
            assert variables["ANTHROPIC_BASE_URL"] == child.url
            models = {n for n in variables if n.startswith("ANTHROPIC_") and n.endswith("_MODEL")}
            assert models >= {f"ANTHROPIC_DEFAULT_{each}_MODEL" for each in ("HAIKU", "FABLE")}
            assert {variables[name] for name in models | {"ANTHROPIC_MODEL"}} == {"left"}
            assert variables["ANTHROPIC_AUTH_TOKEN"]
            assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "1024"
            assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
            # Read as at least 100,000 tokens: one of 4,096 is warned of, and not kept to.
            assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in variables
        case "codex":
            assert f'model_providers.quire.base_url="{child.url}/v1"' in arguments
            assert 'model="left"' in arguments
            assert "model_context_window=4096" in arguments
            assert variables["QUIRE_LAUNCH_KEY"]
        case "opencode":
            content = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
            assert content["model"] == "quire/left"
            assert content["provider"]["quire"]["options"]["baseURL"] == f"{child.url}/v1"
            model = content["provider"]["quire"]["models"]["left"]
            assert model["limit"] == {"context": 4096, "output": 1024}
            assert model["modalities"]["input"] == ["text", "image"]


def test_agents_are_told_what_a_model_takes() -> None:
    """OpenCode leaves out pictures, and neither shortens a conversation, unless they know."""
    place = Place("http://127.0.0.1:8000", "m", "none", 200_000, ("text", "image", "audio"))
    assert "model_context_window=200000" in AGENTS["codex"](place).arguments
    content = json.loads(AGENTS["opencode"](place).variables["OPENCODE_CONFIG_CONTENT"])
    assert content["provider"]["quire"]["models"]["m"] == {
        "name": "m",
        "attachment": True,
        "modalities": {"input": ["text", "image"], "output": ["text"]},
        "limit": {"context": 200_000, "output": 32_000},
    }
    unknown = replace(place, context=None, modalities=("text",))
    assert not any("context" in each for each in AGENTS["codex"](unknown).arguments)
    content = json.loads(AGENTS["opencode"](unknown).variables["OPENCODE_CONFIG_CONTENT"])
    assert content["provider"]["quire"]["models"]["m"] == {
        "name": "m",
        "attachment": False,
        "modalities": {"input": ["text"], "output": ["text"]},
    }


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({}, ""),
        ({"context_length": 131_072, "trained_length": 131_072}, ""),
        (
            {"context_length": 131_072, "trained_length": 4608},
            "m has a context of 131,072 (trained on 4,608) tokens, and fails beyond what it was "
            "trained on; agents need 64,000 or more",
        ),
    ],
)
def test_a_model_too_short_for_agents_is_told(lengths: dict[str, int], said: str) -> None:
    assert too_short({"id": "m"} | lengths) == said


def test_an_agent_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "codex"]) == 1
    assert "codex is not installed" in capsys.readouterr().err


def test_rm_deletes_from_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, commit in (("one", "1" * 40), ("two", "2" * 40)):
        snapshot = tmp_path / f"models--org--{name}" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        refs = tmp_path / f"models--org--{name}" / "refs"
        refs.mkdir()
        (refs / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: scan_cache_dir(tmp_path))
    assert main(["rm", "org/three", "--yes"]) == 1
    assert "'org/three' is not in" in capsys.readouterr().err
    assert main(["rm", "org/one"]) == 1
    assert "--yes" in capsys.readouterr().err
    assert main(["rm", "org/one", "--yes"]) == 0
    assert {each.repo_id for each in scan_cache_dir(tmp_path).repos} == {"org/two"}
    monkeypatch.setattr("quire.cli.hub_cache.short_names", lambda: {"second:4b": "org/two"})
    assert main(["rm", "second:4b", "--yes"]) == 0
    assert not scan_cache_dir(tmp_path).repos


def test_pull_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "no such model"]) == 1
    assert "no model is called 'no such model'" in capsys.readouterr().err
