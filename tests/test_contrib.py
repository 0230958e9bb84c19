"""The files of contrib/ start commands that exist, and are what their programs read."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quire.cli.commands import COMMANDS
from quire.cli.commands import parse as parse_command

ROOT = Path(__file__).parent.parent
CONTRIB = ROOT / "contrib"
DOCKERFILES = sorted((CONTRIB / "docker").glob("*.Dockerfile"))


def test_the_agent_of_launchd_serves() -> None:
    agent = plistlib.loads((CONTRIB / "launchd" / "serve.quire.plist").read_bytes())
    program, *arguments = agent["ProgramArguments"]
    assert Path(program).name == "quire"
    assert parse_command(arguments).command == "serve"
    assert agent["Label"] == "serve.quire"


def test_the_unit_of_systemd_serves_and_stops_later_than_answers(tmp_path: Path) -> None:
    unit = (CONTRIB / "systemd" / "quire.service").read_text()
    (started,) = re.findall(r"^ExecStart=\S*/quire (.+)$", unit, re.MULTILINE)
    config = tmp_path / "config.toml"
    config.write_text("")
    command = parse_command(started.replace("/etc/quire/config.toml", str(config)).split())
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(seconds) > command.model_dump()["stop_grace"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_images_copy_what_the_build_reads(file: Path) -> None:
    text = file.read_text()
    assert re.search(r'^ENTRYPOINT \["quire"\]\nCMD \["serve"\]$', text, re.MULTILINE)
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)).split()
    sources = [name for name in copied if name != "./"]
    assert all((ROOT / name).exists() for name in sources)
    let_in = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(sources) <= set(let_in)


def test_the_formula_is_ruby_and_calls_commands_that_exist() -> None:
    formula = CONTRIB / "homebrew" / "quire-serve.rb"
    for name in re.findall(r'bin/"quire",? "(\w+)"', formula.read_text()):
        assert name in COMMANDS
    if ruby := shutil.which("ruby"):
        subprocess.run([ruby, "-c", str(formula)], check=True, capture_output=True)


def test_the_manifest_of_kubernetes_serves_and_its_pool_finds_the_servers() -> None:
    parts = list(yaml.safe_load_all((CONTRIB / "kubernetes" / "quire.yaml").read_text()))
    deployment, service, pool = parts
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    arguments = container["args"]
    files = {at for at, each in enumerate(arguments) if each.endswith("-file")}
    kept = [each for at, each in enumerate(arguments) if not {at, at - 1} & files]
    command = parse_command(kept)
    settings = command.model_dump()
    (port,) = container["ports"]
    assert settings["port"] == port["containerPort"] == pool["spec"]["targetPorts"][0]["number"]
    assert template["spec"]["terminationGracePeriodSeconds"] > settings["stop_grace"]
    labels = template["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
