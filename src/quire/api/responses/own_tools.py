"""OpenAI's own tools: shells and patches, which clients run, and hosted tools, which nobody runs
here.

To the model, a tool that the client runs is a function whose arguments are the call's action.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from quire.api.shared.schema import History, Wire, tag_by_type
from quire.serving.messages import JsonObject

_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_NUMBER: dict[str, Any] = {"type": "integer"}

Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class OwnTool:
    """A client-run tool that OpenAI defines: its description for the model and its item types.

    Attributes:
        call: item type of a call.
        action: the item's field that holds the call's arguments.
        given: constant members of an action.
        cut_off: status of a call that was cut off.
    """

    description: str
    properties: Mapping[str, dict[str, Any]]
    required: tuple[str, ...]
    call: str
    action: str
    given: Mapping[str, object]
    cut_off: Status = "incomplete"

    @property
    def parameters(self) -> dict[str, object]:
        """The schema of a call's arguments."""
        properties = dict(self.properties)
        return {"type": "object", "properties": properties, "required": list(self.required)}

    def item(self, arguments: Mapping[str, object], status: str) -> dict[str, object]:
        """Return the type, the status and the action of a call.

        Args:
            arguments: as far as they are written. A word that is one of several may be cut off.
        """
        whole = {
            key: arguments[key]
            for key, schema in self.properties.items()
            if key in arguments and arguments[key] in schema.get("enum", (arguments[key],))
        }
        status = self.cut_off if status == "incomplete" else status
        return {"type": self.call, "status": status, self.action: {**self.given, **whole}}


OWN_TOOLS: Mapping[str, OwnTool] = {
    "local_shell": OwnTool(
        "Runs one command on the user's machine, without a shell around it.",
        {
            "command": {**_TEXTS, "description": "The program and its arguments."},
            "env": {"type": "object", "additionalProperties": _TEXT},
            "timeout_ms": _NUMBER,
            "working_directory": _TEXT,
        },
        ("command",),
        call="local_shell_call",
        action="action",
        given={"type": "exec", "command": [], "env": {}},
    ),
    "shell": OwnTool(
        "Runs shell commands on the user's machine, in order.",
        {
            "commands": {**_TEXTS, "description": "The command lines, in order."},
            "timeout_ms": _NUMBER,
            "max_output_length": {**_NUMBER, "description": "Characters of output to return."},
        },
        ("commands",),
        call="shell_call",
        action="action",
        given={"commands": [], "timeout_ms": None, "max_output_length": None},
    ),
    "apply_patch": OwnTool(
        "Creates, updates or deletes one file of the user's workspace.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {**_TEXT, "description": "The file, from the workspace's root."},
            "diff": {**_TEXT, "description": "The changes; none for a file to delete."},
        },
        ("type", "path"),
        call="apply_patch_call",
        action="operation",
        given={"type": "update_file", "path": "", "diff": ""},
        cut_off="in_progress",
    ),
}


class ClientRunTool(History):
    """A shell or an editor of files that the client runs; `environment` is the client's own."""

    model_config = ConfigDict(extra="allow")

    type: Literal["local_shell", "shell", "apply_patch"]


class HostedTool(History):
    """A tool that OpenAI's servers run and that Codex offers unasked.

    It is not run here, so the model does not see it, the answer's `tools` leave it out, and the
    client is told that it has no effect.
    """

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


class OwnChoice(Wire):
    """One of OpenAI's tools, which must be called, or in a list of allowed ones, may be."""

    type: Literal["shell", "apply_patch"]


class Caller(History):
    """The caller of a tool: the model, or a program of its that ran at OpenAI."""

    type: str
    caller_id: str | None = None


class OwnCallItem(History):
    """A call of a tool that the client runs. The model wrote its action."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str
    action: JsonObject | None = None
    operation: JsonObject | None = None
    environment: JsonObject | None = None
    caller: Caller | None = None
    id: str | None = None
    status: Status | None = None

    @property
    def kind(self) -> str:
        """The tool that was called."""
        return next(kind for kind, tool in OWN_TOOLS.items() if tool.call == self.type)

    def arguments(self) -> dict[str, object]:
        """Return the arguments that the model wrote."""
        tool = OWN_TOOLS[self.kind]
        said: dict[str, object] = getattr(self, tool.action) or {}
        return {
            key: value
            for key, value in said.items()
            if key in tool.properties and value is not None
        }


class OwnOutputItem(History):
    """The output of a client-run tool. That of a local shell may name its call by `id` alone."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: str | None = None
    id: str | None = None
    output: str | list[dict[str, object]] | None = None
    max_output_length: int | None = None
    caller: Caller | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] | None = None

    def text(self) -> str:
        """Return the text of the output, as the model reads it."""
        if isinstance(self.output, list):
            return json.dumps(self.output, ensure_ascii=False)
        if self.type != "apply_patch_call_output":
            return self.output or ""
        return ": ".join(each for each in (self.status or "completed", self.output) if each)


class HostedCallItem(History):
    """A call of a tool that OpenAI hosts, from a conversation that started there.

    The model does not see it: the following answer states what was found. The client is told that
    it has no effect.
    """

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=r"^[a-z_]+$")]
    id: str | None = None
    status: str | None = None


class CompactionItem(History):
    """A packed summary of an earlier conversation; see `compaction`."""

    type: Literal["compaction", "context_compaction"]
    encrypted_content: str | None = None
    id: str | None = None


_HOSTED = ("web_search", "image_generation", "code_interpreter", "file_search", "mcp", "computer")
_HOSTED_ITEMS = frozenset(
    {"computer_call_output", "compaction_trigger", "program", "program_output"}
    | {f"{tool}_call" for tool in _HOSTED if tool != "mcp"}
)


def tag_tool(value: object) -> str | None:
    """Return the union tag of a tool. All hosted tools share one."""
    tag = tag_by_type(value)
    if tag is None:
        return None
    kind = tag[1:]
    if kind.startswith(_HOSTED) or kind == "programmatic_tool_calling":
        return "@hosted"
    fields = value if isinstance(value, dict) else {}
    environment = fields.get("environment")
    place = environment.get("type") if isinstance(environment, dict) else None
    if kind == "tool_search" and fields.get("execution", "server") == "server":
        return "@hosted"
    return "@hosted" if kind == "shell" and str(place).startswith("container") else tag


def tag_hosted_item(tag: str | None) -> str | None:
    """Return one shared tag for all items of hosted tools, and other tags unchanged."""
    return "@hosted" if tag is not None and tag[1:] in _HOSTED_ITEMS else tag
