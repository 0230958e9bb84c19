"""Reads the file of MCP servers, in the form of desktop clients: `{"mcpServers": {...}}`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from quire.cli.files import read
from quire.cli.settings import describe
from quire.cli.values import HttpUrl
from quire.core.errors import QuireError
from quire.core.mcp import McpServer

_OPTION = "--mcp-servers"
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


class _Entry(BaseModel):
    """One server, as the file describes it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["stdio", "http", "streamable-http"] | None = None
    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str = ""
    url: HttpUrl | Literal[""] = ""
    headers: dict[str, str] = {}
    timeout: float = Field(60.0, gt=0, le=3600)
    disabled: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> _Entry:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either 'command' (a program) or 'url' (streamable HTTP)")
        if self.type is not None and (self.type == "stdio") == bool(self.url):
            raise ValueError(f"'type' is {self.type}, which contradicts the other keys")
        foreign = ("args", "env", "cwd") if self.url else ("headers",)
        if set(foreign) & self.model_fields_set:
            names = ", ".join(sorted(set(foreign) & self.model_fields_set))
            raise ValueError(
                f"{names} has no meaning for a server by {'url' if self.url else 'command'}"
            )
        return self


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    mcp_servers: dict[_Name, _Entry]


def mcp_servers(path: Path | None) -> tuple[McpServer, ...]:
    """Return the servers of a file, except disabled ones.

    `${NAME}` in a value of `env` or `headers` stands for an environment variable.

    Raises:
        QuireError: the file cannot be read, or has an unknown key.
    """
    if path is None:
        return ()
    try:
        entries = TypeAdapter(_File).validate_json(read(path, _OPTION)).mcp_servers
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise QuireError(f"{_OPTION}: {path}: {where or 'the file'}: {describe(first)}") from error
    return tuple(
        McpServer(
            name=name,
            command=(entry.command, *entry.args) if entry.command else (),
            env=_filled(entry.env, path),
            folder=entry.cwd,
            url=entry.url,
            headers=_filled(entry.headers, path),
            timeout_s=entry.timeout,
        )
        for name, entry in entries.items()
        if not entry.disabled
    )


def _filled(values: dict[str, str], path: Path) -> dict[str, str]:
    def variable(found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        if value is None:
            raise QuireError(f"{_OPTION}: {path}: the variable {found[1]} is not set")
        return value

    return {name: re.sub(r"\$\{(\w+)\}", variable, value) for name, value in values.items()}
