"""Tools of Anthropic's messages: client-defined ones and Anthropic's own.

Of Anthropic's own, a client runs the shell, the editor, the memory and the computer: the model is
given their published arguments. Those that Anthropic's servers run have no effect here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from quire.api.messages.blocks import ContentBlock
from quire.api.shared.content import FunctionName, function_tool
from quire.api.shared.numbers import Integer
from quire.serving.messages import JsonObject, TemplateTool

_TEXT: JsonObject = {"type": "string"}
_NUMBER: JsonObject = {"type": "integer"}
_POINT: JsonObject = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}


class ClientTool(ContentBlock):
    """Fields that every tool run by the client may carry.

    The model sees a tool with `defer_loading` only after a `tool_reference` names it.
    """

    name: FunctionName
    strict: bool | None = None
    input_examples: list[JsonObject] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = Field(
        default=None, description="only the model calls tools here: others have no effect"
    )

    @property
    def called_by_code(self) -> bool:
        """Whether code may call the tool, too, which nobody runs here."""
        return bool(set(self.allowed_callers or ()) - {"direct"})

    def to_template(self) -> TemplateTool:
        """Return the shape that chat templates read."""
        description, schema = self.function()
        if self.input_examples:
            schema.setdefault("examples", self.input_examples)
        return function_tool(self.name, description, schema)

    def function(self) -> tuple[str | None, JsonObject]:
        """Return the tool's function: its description and the schema of its arguments."""
        raise NotImplementedError


class CustomTool(ClientTool):
    """A tool that the client defines."""

    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: JsonObject

    def function(self) -> tuple[str | None, JsonObject]:
        """Return the function as the client defined it."""
        return self.description, dict(self.input_schema)


class BashTool(ClientTool):
    """A shell that stays open between calls."""

    type: str = Field(pattern=r"^bash_\d{8}$")

    def function(self) -> tuple[str | None, JsonObject]:
        """Return the function, with a command to run, or a restart."""
        restart = {"type": "boolean", "description": "Restart the shell instead of a command."}
        command = {**_TEXT, "description": "The command to run."}
        return (
            "Runs commands in a bash shell that keeps its state between calls.",
            _arguments({"command": command, "restart": restart}),
        )


class EditorTool(ClientTool):
    """An editor of text files; versions before 20250429 can undo."""

    type: str = Field(pattern=r"^text_editor_\d{8}$")
    max_characters: Integer | None = Field(default=None, ge=1)

    def function(self) -> tuple[str | None, JsonObject]:
        """Return the function, with a command, the file and the command's arguments."""
        undo = ("undo_edit",) if self.type < "text_editor_20250429" else ()
        written = "new_str" if undo else "insert_text"
        return (
            "Shows, creates and edits text files.",
            _arguments(
                {
                    "command": _one_of("view", "create", "str_replace", "insert", *undo),
                    "path": {**_TEXT, "description": "The file or folder."},
                    "file_text": {**_TEXT, "description": "The text of a file to create."},
                    "old_str": {**_TEXT, "description": "The text to replace, found once."},
                    "new_str": {**_TEXT, "description": "The text that replaces `old_str`."},
                    "insert_line": {
                        **_NUMBER,
                        "description": f"The line after which `{written}` is inserted; 0: first.",
                    },
                    written: {**_TEXT, "description": "The text to insert, or the replacement."},
                    "view_range": {**_POINT, "description": "First and last line; -1: the end."},
                },
                "command",
                "path",
            ),
        )


class MemoryTool(ClientTool):
    """A folder of files that outlives a conversation."""

    type: str = Field(pattern=r"^memory_\d{8}$")

    def function(self) -> tuple[str | None, JsonObject]:
        """Return the function, with a command and its arguments."""
        texts = ("path", "file_text", "old_str", "new_str", "insert_text", "old_path", "new_path")
        commands = ("view", "create", "str_replace", "insert", "delete", "rename")
        return (
            "Keeps files under /memories between conversations: shows, creates, edits, deletes "
            "and renames them.",
            _arguments(
                {
                    "command": _one_of(*commands),
                    **dict.fromkeys(texts, _TEXT),
                    "insert_line": _NUMBER,
                    "view_range": _POINT,
                },
                "command",
            ),
        )


class ComputerTool(ClientTool):
    """A screen, a mouse and a keyboard."""

    type: str = Field(pattern=r"^computer_\d{8}$")
    display_width_px: Integer = Field(ge=1)
    display_height_px: Integer = Field(ge=1)
    display_number: Integer | None = None
    enable_zoom: bool | None = None

    def function(self) -> tuple[str | None, JsonObject]:
        """Return the function, with an action and its arguments."""
        actions = ["key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"]
        actions += ["middle_click", "double_click", "screenshot", "cursor_position"]
        more: JsonObject = {}
        if self.type >= "computer_20250124":
            actions += ["left_mouse_down", "left_mouse_up", "triple_click", "scroll"]
            actions += ["hold_key", "wait"]
            more = {
                "start_coordinate": _POINT,
                "scroll_direction": _one_of("up", "down", "left", "right"),
                "scroll_amount": _NUMBER,
                "duration": {"type": "number", "description": "Seconds."},
            }
        if self.enable_zoom:
            actions.append("zoom")
            region = {**_POINT, "minItems": 4, "maxItems": 4}
            more["region"] = {**region, "description": "Left, top, right, bottom."}
        size = f"{self.display_width_px} x {self.display_height_px}"
        coordinate = {**_POINT, "description": "x and y in pixels from the top left corner."}
        text = {**_TEXT, "description": "What to type, or the keys to press."}
        arguments = {"action": _one_of(*actions), "coordinate": coordinate, "text": text, **more}
        return (
            f"Uses the mouse and the keyboard of a screen of {size} pixels, and takes screenshots.",
            _arguments(arguments, "action"),
        )


class HostedTool(ContentBlock):
    """A tool that Anthropic's servers run, or a set of their tools.

    The model does not see it, and the client is told that it has no effect.
    """

    type: str = Field(pattern=r"^[a-z0-9_]+$")


_CLIENT = ("bash_", "text_editor_", "memory_", "computer_")
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset")
_SETS = ("advisor_", "browser_toolset_", "computer_toolset_")


def _tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None:
        return "@custom"
    if not isinstance(kind, str):
        return None
    if kind.startswith((*_HOSTED, *_SETS)):
        return "@hosted"
    return f"@{next((each for each in _CLIENT if kind.startswith(each)), kind)}"


Tool = Annotated[
    Annotated[CustomTool, Tag("@custom")]
    | Annotated[BashTool, Tag("@bash_")]
    | Annotated[EditorTool, Tag("@text_editor_")]
    | Annotated[MemoryTool, Tag("@memory_")]
    | Annotated[ComputerTool, Tag("@computer_")]
    | Annotated[HostedTool, Tag("@hosted")],
    Discriminator(_tag),
]


def searches(tool: ClientTool | HostedTool) -> bool:
    """Return whether a tool is the search of Anthropic's servers, which finds nothing here."""
    return isinstance(tool, HostedTool) and tool.type.startswith("tool_search_tool_")


def _arguments(properties: JsonObject, *required: str) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


def _one_of(*values: str) -> JsonObject:
    return {"type": "string", "enum": list(values)}
