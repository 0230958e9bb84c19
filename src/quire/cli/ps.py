"""`quire ps`: the models of a running server, and which are loaded."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import Field
from rich.console import Console, Group

from quire.cli.fitting import FittingTable
from quire.cli.keys import ClientOptions
from quire.cli.models import with_problems
from quire.cli.served import Server
from quire.cli.settings import Command, TableOptions
from quire.cli.values import Flag
from quire.cli.waiting import loaded
from quire.core.errors import QuireError
from quire.core.figures import duration, size


class PsCommand(ClientOptions, TableOptions, Command):
    """Lists the models of a running server: whether each is loaded, its memory, how many requests
    use it, and when it is unloaded.
    """

    command: ClassVar[str] = "ps"
    summary: ClassVar[str] = "list, load or unload the models of a server"
    alternatives: ClassVar[tuple[str, ...]] = ("load", "unload")

    load: Annotated[str | None, Flag("NAME")] = Field(
        None, description="load this model, then list"
    )
    unload: Annotated[str | None, Flag("NAME")] = Field(
        None, description="unload this model, or stop its loading, then list"
    )
    force: bool = Field(False, description="with --unload: even if the model is pinned")

    def _check_pinned(self, models: list[dict[str, Any]]) -> None:
        """Raise `QuireError` if the model is pinned and `--force` is not given."""
        if not self.force and any(
            each["id"] == self.unload and each.get("pinned") for each in models
        ):
            raise QuireError(f"{self.unload} is pinned: add --force to unload it")

    def run(self) -> int:
        """Print the models.

        Raises:
            QuireError: the server cannot be reached, or refuses.
        """
        server = Server(self.url, self.key)
        if self.load:
            loaded(server, self.load)
        if self.unload:
            self._check_pinned(server.models())
            server.unload(self.unload)
        models = server.models()
        if self.as_json:
            print(json.dumps(models, indent=2))
        else:
            Console().print(listing(models))
        return 0


def listing(models: list[dict[str, Any]]) -> Group:
    """Return the models for the terminal, and why some could not be loaded."""
    headings = ("model", "state", "weights", "max KV", "requests", "unloaded in")
    table = FittingTable(headings, [_row(each) for each in models], texts=2)
    return with_problems(
        table, {each["id"]: each["problem"] for each in models if each.get("problem")}
    )


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    here = model.get("state") == "loaded"
    return (
        model["id"],
        model.get("state", "-"),
        size(model["weight_bytes"]) if here else "-",
        size(model["kv_bytes"]) if here else "-",
        str(model.get("requests", "-")),
        _expiry(model) if here else "-",
    )


def _expiry(model: dict[str, Any]) -> str:
    if model.get("pinned"):
        return "pinned"
    return "-" if model.get("expires_s") is None else duration(round(model["expires_s"]))
