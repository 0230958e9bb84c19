"""The examples of docs/ run as they are written, with the embedded model under each name."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image

from quire.cli.short_names import short_names
from quire.demo import MODEL_DIR
from tests.support.child import Child, running

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("adapters", "agents", "convert", "embeddings", "memory", "monitoring", "walk")
BEFORE = {"monitoring": "quire serve --metrics-key-file /etc/quire/metrics-key"}
"""The server that a page takes for granted."""
CLIENT = """\
import base64, openai
from pathlib import Path
client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
"""
PYTHON = {
    "batch": CLIENT,
    "media": CLIENT,
    "ollama": "",
    "python": "import quire\nllm = quire.LLM()\n",
}
"""What the examples of a page build on, by page."""
ELSEWHERE = re.compile(
    r"^(\. |pip |python3 -m venv|.*quire launch|quire serve MODEL --stop-on-loop"
    r"|export OPENAI_API_KEY|OPENAI_MODEL=coder qwen|cline|aider)"
)
"""Commands that install something, or start an agent."""


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a shell block, each with the lines that belong to it."""
    text = ""
    for line in block.splitlines(keepends=True):
        text += line
        try:
            shlex.split(text, comments=True)
        except ValueError:  # a quotation goes on
            continue
        if not text.endswith("\\\n"):
            if text.strip():
                yield text.strip()
            text = ""
    assert not text, text


def blocks(page: str, *languages: str) -> list[str]:
    found = BLOCK.findall((DOCS / f"{page}.md").read_text())
    return [text for language, text in found if language in languages]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that holds every file which the examples name."""
    folder = tmp_path_factory.mktemp("world")
    for name in ("MODEL", "path/to/model", "org/model", "Qwen/Qwen3-Embedding-0.6B"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(MODEL_DIR)
    for name in ("path/to/sql-lora", "org/support-lora", "path/to/new-lora"):
        write_adapter(folder / name)
    (folder / "quire").mkdir()
    names = (f'"{name}" = {json.dumps(str(MODEL_DIR))}\n' for name in short_names())
    (folder / "quire" / "names.toml").write_text("".join(names))
    (folder / "metrics-key").write_text("key")
    (folder / ".curlrc").write_text("fail\nsilent\nshow-error\n")
    (folder / "in.jsonl").write_text(blocks("batch", "")[0])
    Image.new("RGB", (64, 64), "red").save(folder / "cat.png")
    pause = b"\0\0" * 16_000
    head = b"WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data"
    wave = head + len(pause).to_bytes(4, "little") + pause
    wave = b"RIFF" + len(wave).to_bytes(4, "little") + wave
    for name in ("question.wav", "speech.mp3"):
        (folder / name).write_bytes(wave)
    command = folder / "bin" / "quire"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n')
    command.chmod(0o755)
    return folder


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of the embedded model that changes nothing."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    weights = mx.load(str(MODEL_DIR / "model.safetensors"))
    assert isinstance(weights, dict)
    tensors = {}
    for name, array in weights.items():
        if name.endswith("self_attn.q_proj.weight") and "language_model" in name:
            path = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{path}.lora_A.weight"] = mx.zeros((1, array.shape[1]))
            tensors[f"{path}.lora_B.weight"] = mx.zeros((array.shape[0], 1))
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)


class Shell:
    """Runs commands in the world; a server that they start serves until the next one starts."""

    def __init__(self, world: Path, stack: ExitStack) -> None:
        self._world = world
        self._stack = stack.enter_context(ExitStack())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._environment = {
            **os.environ,
            "PATH": f"{world / 'bin'}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(world),
            "CURL_HOME": str(world),
            "QUIRE_PORT": str(self._port),
            "QUIRE_URL": f"http://127.0.0.1:{self._port}",
            "HF_HUB_OFFLINE": "1",
        }

    def here(self, text: str) -> str:
        """Return a text with this machine's port and folders."""
        text = re.sub(r"(127\.0\.0\.1|localhost):8000", rf"\1:{self._port}", text)
        return text.replace("/etc/quire", str(self._world))

    def serve(self, command: str) -> Child:
        self._stack.close()
        arguments = shlex.split(self.here(command), comments=True)[1:]
        return self._stack.enter_context(
            running(self._world, "quire", *arguments, cwd=self._world, env=self._environment)
        )

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [self.here(part) for part in command],
            cwd=self._world,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def shell(world: Path) -> Iterator[Shell]:
    with ExitStack() as stack:
        yield Shell(world, stack)


@pytest.mark.parametrize("page", SHELL)
def test_commands_run(page: str, shell: Shell) -> None:
    done = 0
    if page in BEFORE:
        shell.serve(BEFORE[page])
    for block in blocks(page, ""):
        for command in commands(block):
            if ELSEWHERE.match(command):
                continue
            if command.startswith("quire serve"):
                shell.serve(command)
            else:
                shell.run("bash", "-c", command)
            done += 1
    assert done


@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(page: str, shell: Shell) -> None:
    shell.serve("quire serve quire-demo gemma-4-e2b-it=quire-demo NAME=quire-demo --files files")
    if page == "ollama":
        pytest.importorskip("ollama")
    for block in blocks(page, "python"):
        shell.run(sys.executable, "-c", PYTHON[page] + block)


def test_batches_run(shell: Shell, world: Path) -> None:
    shell.serve("quire serve quire-demo")
    for command in commands(blocks("batch", "")[1]):
        shell.run("bash", "-c", command)
        (answer,) = (world / "out.jsonl").read_text().splitlines()
        assert json.loads(answer)["response"]["status_code"] == 200
        (world / "out.jsonl").unlink()
