"""`quire launch`: starts a coding agent that talks to a running server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quire.cli.keys import ClientOptions
from quire.cli.load import Target, served_model
from quire.cli.settings import Command
from quire.cli.values import Flag
from quire.core.errors import QuireError

_KEY = "QUIRE_LAUNCH_KEY"


@dataclass(frozen=True, slots=True)
class Start:
    """How an agent is started: arguments before the user's own, and variables."""

    arguments: tuple[str, ...]
    variables: dict[str, str]


def _claude(base: str, model: str, key: str) -> Start:
    """https://docs.anthropic.com/en/docs/claude-code/settings: all its models are this one."""
    names = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
    )
    variables = {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_AUTH_TOKEN": key}
    return Start((), variables | dict.fromkeys(names, model))


def _codex(base: str, model: str, key: str) -> Start:
    """https://developers.openai.com/codex/config-advanced: a provider of its own."""
    provider = {
        "name": "Quire",
        "base_url": f"{base}/v1",
        "wire_api": "responses",
        "env_key": _KEY,
    }
    settings = [f"model_providers.quire.{name}={json.dumps(it)}" for name, it in provider.items()]
    settings += ['model_provider="quire"', f"model={json.dumps(model)}"]
    return Start(tuple(part for each in settings for part in ("-c", each)), {_KEY: key})


def _opencode(base: str, model: str, key: str) -> Start:
    """https://opencode.ai/docs/config: a provider in a configuration beside the user's own."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Quire",
        "options": {"baseURL": f"{base}/v1", "apiKey": key},
        "models": {model: {"name": model}},
    }
    content = {"provider": {"quire": provider}, "model": f"quire/{model}"}
    return Start((), {"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


AGENTS: dict[str, Callable[[str, str, str], Start]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}


class LaunchCommand(ClientOptions, Command):
    """Starts an agent so that it talks to a running server. What follows -- goes to the agent."""

    command: ClassVar[str] = "launch"
    summary: ClassVar[str] = "start a coding agent with this server"

    agent: Annotated[Literal["claude", "codex", "opencode"], Flag(positional=True)]
    served_model: Annotated[str | None, Flag("NAME")] = Field(
        None, description="default: the first that the server lists"
    )
    arguments: Annotated[tuple[str, ...], Flag(after_dashes=True)] = ()

    def run(self) -> int:
        """Becomes the agent.

        Raises:
            QuireError: it is not installed, or the server is not there.
        """
        program = shutil.which(self.agent)
        if program is None:
            raise QuireError(f"{self.agent} is not installed: no such program in PATH")
        try:
            target = Target.parse(self.url, self.key)
        except ValueError as error:
            raise QuireError(str(error)) from error
        model = self.served_model or served_model(target, timeout_s=30)
        base = self.url.rstrip("/").removesuffix("/v1")
        start = AGENTS[self.agent](base, model, self.key or "none")
        command = [self.agent, *start.arguments, *self.arguments]
        os.execve(program, command, os.environ | start.variables)
