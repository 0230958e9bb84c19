"""`quire launch`: starts a coding agent that talks to a running server."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from quire.cli.keys import add_client_key_arguments, client_key
from quire.cli.load import Target, served_model
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


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "launch",
        help="start a coding agent with this server",
        description="Starts an agent so that it talks to a running server. What follows -- goes "
        "to the agent.",
    )
    parser.add_argument("agent", choices=tuple(AGENTS))
    parser.set_defaults(arguments=())  # what follows --
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--served-model", help="default: the first that the server lists")
    add_client_key_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Becomes the agent.

    Raises:
        QuireError: it is not installed, or the server is not there.
    """
    program = shutil.which(args.agent)
    if program is None:
        raise QuireError(f"{args.agent} is not installed: no such program in PATH")
    key = client_key(args)
    try:
        target = Target.parse(args.url, key)
    except ValueError as error:
        raise QuireError(str(error)) from error
    model = args.served_model or served_model(target, timeout_s=30)
    base = args.url.rstrip("/").removesuffix("/v1")
    start = AGENTS[args.agent](base, model, key or "none")
    command = [args.agent, *start.arguments, *args.arguments]
    os.execve(program, command, os.environ | start.variables)
