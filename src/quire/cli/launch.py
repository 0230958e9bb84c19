"""`quire launch`: starts a coding agent that talks to a running server."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.cli.keys import ClientOptions
from quire.cli.served import Server
from quire.cli.settings import LAUNCH_KEY, Command
from quire.cli.values import Flag
from quire.cli.waiting import loaded
from quire.core import figures
from quire.core.errors import QuireError

ADVISED_CONTEXT = 64_000
"""Advised context in tokens. Claude Code 2.1.330 starts with 21,000 for the embedded model's
tokenizer, 2.1.197 with 39,000; larger vocabularies need fewer. The rest is for files, tool results
and answers.
"""
_ANSWER_SHARE = 4
_LONGEST_ANSWER = 32_000
"""Most tokens of an answer, which is Claude Code's and OpenCode's own limit."""


@dataclass(frozen=True, slots=True)
class Start:
    """How an agent is started: arguments before the user's own, and environment variables."""

    arguments: tuple[str, ...]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """The server's address, model and key, as an agent needs them.

    Attributes:
        base: the URL without `/v1`.
        context: the most tokens of prompt and answer together; None if the server does not say.
        modalities: kinds of content that the model reads.
    """

    base: str
    model: str
    key: str
    context: int | None
    modalities: tuple[str, ...] = ("text",)

    @property
    def answer(self) -> int | None:
        """The most tokens of an answer."""
        if self.context is None:
            return None
        return max(1, min(_LONGEST_ANSWER, self.context // _ANSWER_SHARE))


def _claude(place: Place) -> Start:
    """Return Claude Code's start, with every model name set to this model.

    https://docs.anthropic.com/en/docs/claude-code/settings
    """
    names = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_FABLE_MODEL",
    )
    variables = {"ANTHROPIC_BASE_URL": place.base, "ANTHROPIC_AUTH_TOKEN": place.key}
    variables |= dict.fromkeys(names, place.model)
    if place.context is not None:
        # Else it counts on a million tokens. CLAUDE_CODE_AUTO_COMPACT_WINDOW is at least 100,000.
        own = {
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(place.answer),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(place.context),
        }
        variables |= {name: os.environ.get(name) or value for name, value in own.items()}
    return Start((), variables)


def _codex(place: Place) -> Start:
    """Return Codex's start, with a provider of its own.

    https://developers.openai.com/codex/config-advanced
    """
    provider = {
        "name": "Quire",
        "base_url": f"{place.base}/v1",
        "wire_api": "responses",
        "env_key": LAUNCH_KEY,
    }
    settings = [f"model_providers.quire.{name}={json.dumps(it)}" for name, it in provider.items()]
    settings += ['model_provider="quire"', f"model={json.dumps(place.model)}"]
    if place.context is not None:  # else it counts on what its own models have
        settings.append(f"model_context_window={place.context}")
    return Start(tuple(part for each in settings for part in ("-c", each)), {LAUNCH_KEY: place.key})


def _opencode(place: Place) -> Start:
    """Return OpenCode's start, with a provider in a configuration beside the user's own.

    https://opencode.ai/docs/config. Without modalities it sends text only; without limits it never
    compacts a conversation.
    """
    seen = [each for each in ("text", "image") if each in place.modalities]
    model: dict[str, Any] = {
        "name": place.model,
        "attachment": "image" in seen,
        "modalities": {"input": seen, "output": ["text"]},
    }
    if place.context is not None:
        model["limit"] = {"context": place.context, "output": place.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Quire",
        "options": {"baseURL": f"{place.base}/v1", "apiKey": place.key},
        "models": {place.model: model},
    }
    content = {"provider": {"quire": provider}, "model": f"quire/{place.model}"}
    return Start((), {"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


AGENTS: dict[str, Callable[[Place], Start]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}


_PACKAGES = {
    "claude": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "opencode": "opencode-ai",
}


def too_short(model: dict[str, Any]) -> str:
    """Return why a listed model's context is too short for agents; empty if it is not, or is
    unknown.
    """
    context = model.get("context_length") or ADVISED_CONTEXT
    trained = model.get("trained_length") or context
    if min(context, trained) >= ADVISED_CONTEXT:
        return ""
    why = f"has a context of {figures.context(context, trained)} tokens"
    if trained < context:
        why += ", and fails beyond what it was trained on"
    return f"{model['id']} {why}; agents need {ADVISED_CONTEXT:,} or more"


class LaunchCommand(ClientOptions, Command):
    """Starts an agent so that it talks to a running server. What follows -- goes to the agent."""

    command: ClassVar[str] = "launch"
    summary: ClassVar[str] = "start a coding agent that uses this server"

    agent: Annotated[Literal["claude", "codex", "opencode"], Flag(positional=True)] = Field(
        description="the agent's command, which must be installed"
    )
    served_model: Annotated[str | None, Flag("NAME")] = Field(
        None, description="the model's name; default: the first that the server lists"
    )
    arguments: Annotated[tuple[str, ...], Flag(after_dashes=True)] = ()

    def run(self) -> int:
        """Replace this process by the agent.

        Raises:
            QuireError: the agent is not installed, the server cannot be reached, or it does not
                serve the model.
        """
        program = shutil.which(self.agent)
        if program is None:
            raise QuireError(
                f"{self.agent} is not installed (not found in PATH); "
                f"npm install -g {_PACKAGES[self.agent]} installs it"
            )
        server, key = Server(self.url, self.key), self.key
        model = server.model(self.served_model)
        if model.get("state") == "unloaded":
            print(f"quire: loading {model['id']}", file=sys.stderr, flush=True)
            model = loaded(server, model["id"])
        if warning := too_short(model):
            print(f"quire: {warning}", file=sys.stderr, flush=True)
        context = model.get("context_length")
        name = self.served_model or str(model["id"])
        modalities = tuple(model.get("modalities") or ("text",))
        start = AGENTS[self.agent](
            Place(server.base, name, key=key or "none", context=context, modalities=modalities)
        )
        command = [self.agent, *start.arguments, *self.arguments]
        os.execve(program, command, os.environ | start.variables)
