"""`quire ps`: the models of a running server, and which are loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from quire.cli.keys import add_client_key_arguments, client_key
from quire.cli.load import Target
from quire.cli.models import shortened
from quire.core.errors import QuireError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "ps",
        help="list the models of a server, load or unload one",
        description="Lists the models of a running server: which are loaded, what they hold, how "
        "many requests use them, and when they go.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    add_client_key_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--load", metavar="NAME", help="load this model first")
    what.add_argument("--unload", metavar="NAME", help="unload this model first")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints the models.

    Raises:
        QuireError: the server is not there, or refuses.
    """
    models = _asked(args)
    if args.json:
        print(json.dumps(models, indent=2))
    else:
        Console().print(table(models))
    return 0


def _asked(args: argparse.Namespace) -> list[dict[str, Any]]:
    try:
        Target.parse(args.url)
    except ValueError as error:
        raise QuireError(str(error)) from error
    base, key = args.url.rstrip("/").removesuffix("/v1"), client_key(args)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=None) as client:
            for verb in ("load", "unload"):
                if name := getattr(args, verb):
                    _good(client.post(f"/models/{verb}", json={"model": name}))
            found: list[dict[str, Any]] = _good(client.get("/v1/models"))["data"]
            return found
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise QuireError(f"{base} does not answer as a server does: {error}") from error


def _good(answer: httpx.Response) -> Any:
    body = answer.json()
    if answer.status_code != 200:
        raise QuireError(body["error"]["message"])
    return body


def table(models: list[dict[str, Any]]) -> Table:
    """The models as a table for the terminal."""
    out = Table(box=SIMPLE)
    out.add_column("model", overflow="fold")
    out.add_column("state")
    for heading in ("weights", "KV pages", "requests", "unloaded in"):
        out.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        loaded = model.get("state") == "loaded"
        out.add_row(
            model["id"],
            model.get("state", "-"),
            shortened(model["weight_bytes"]) if loaded else "-",
            shortened(model["kv_bytes"]) if loaded else "-",
            str(model.get("requests", "-")),
            _expiry(model) if loaded else "-",
        )
        if model.get("problem"):
            out.add_row(f"  {model['problem']}", style="red")
    return out


def _expiry(model: dict[str, Any]) -> str:
    if model.get("pinned"):
        return "pinned"
    return "-" if model.get("expires_s") is None else f"{model['expires_s']:.0f} s"
