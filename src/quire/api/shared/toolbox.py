"""The tools that may be called, with their names for the model and for the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.api.shared.content import INPUT, function_tool
from quire.core.errors import RequestError
from quire.serving.generation import ToolChoice
from quire.serving.messages import JsonObject, TemplateTool
from quire.serving.regular_lark import NotRegular, regular

SEARCH = "tool_search"
"""Name of the function that represents a search for tools."""


OwnKind = Literal["local_shell", "shell", "apply_patch"]
"""OpenAI's tools that the client runs; each is called by its kind."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool's name and kind for the client."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom", "search"] | OwnKind = "function"

    @property
    def model_name(self) -> str:
        """Return the tool's name for the model."""
        return model_name(self.name, self.namespace)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools that may be called.

    Attributes:
        named: the client's name of each tool, by the name that the model reads.
        templates: tools shown to the model.
        strict: names of tools whose calls must meet their schemas.
        left_out: paths of hosted tools, which are not run here, and of grammars that are not
            enforced.
    """

    named: dict[str, ClientTool] = field(default_factory=dict)
    templates: tuple[TemplateTool, ...] = ()
    strict: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)

    def client_name(self, name: str) -> ClientTool:
        """Return the client's name of a tool that the model called."""
        return self.named.get(name) or ClientTool(name)


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """A choice that hides all other tools from the model."""

    mode: Literal["auto", "required"]
    tools: Sequence[ClientTool]


Choice = Literal["none", "auto", "required"] | ClientTool | AllowedTools | None
"""`tool_choice` of any protocol; a tool means that this one must be called."""


class ToolboxBuilder:
    """Collects tools in order. A later tool replaces an earlier one of the same name, as a
    conversation may define a tool anew, unless it is added as `unique`.
    """

    def __init__(self) -> None:
        self._named: dict[str, ClientTool] = {}
        self._templates: dict[str, TemplateTool] = {}
        self._strict: set[str] = set()
        self._left_out: list[str] = []
        self._deferred = ""

    def add_function(
        self,
        tool: ClientTool,
        description: str | None,
        parameters: JsonObject | None,
        *,
        strict: bool = False,
        unique: str = "",
    ) -> None:
        """Add a tool that takes arguments.

        Args:
            tool: of any kind but "custom".
            parameters: a JSON schema; None takes no arguments.
            unique: path of the request's field that names the tool; if given, a name that an
                earlier tool has is refused.

        Raises:
            RequestError: the name is taken.
        """
        self._put(tool, unique)
        self._templates[tool.model_name] = function_tool(tool.model_name, description, parameters)
        if strict:
            self._strict.add(tool.model_name)

    def add_custom(
        self,
        tool: ClientTool,
        description: str | None,
        grammar: tuple[str, str] | None,
        *,
        param: str,
        unique: str = "",
    ) -> None:
        """Add a tool that takes a text. The model sees a function with one argument.

        Args:
            grammar: syntax and definition, which the model is told and held to. A grammar that is
                no regular expression is only told; its path is among `Toolbox.left_out`.
            param: the path of the definition.
            unique: see `add_function`.
        """
        text: JsonObject = {"type": "string"}
        pattern = None if grammar is None else _pattern(*grammar)
        if grammar is not None:
            text["description"] = f"Follows this {grammar[0]} grammar: {grammar[1]}"
            if pattern is None:
                self.leave_out(param)
            else:
                text["pattern"] = pattern
        parameters: JsonObject = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
        }
        strict = pattern is not None
        self.add_function(tool, description, parameters, strict=strict, unique=unique)

    def defer(
        self, tool: ClientTool, param: str, *, strict: bool = False, unique: str = ""
    ) -> None:
        """Add a tool that the model does not see until a search has found it.

        Args:
            param: the request's field that defers it.
            unique: see `add_function`.
        """
        self._put(tool, unique)
        self._deferred = self._deferred or param
        if strict:
            self._strict.add(tool.model_name)

    def leave_out(self, param: str) -> None:
        """Record the path of a hosted tool, which is not run here, or of a part without effect."""
        self._left_out.append(param)

    def _put(self, tool: ClientTool, unique: str) -> None:
        if unique and tool.model_name in self._named:
            raise name_taken(unique, tool.model_name)
        self._named[tool.model_name] = tool

    def build(self, choice: Choice) -> Toolbox:
        """Return the toolbox and the choice among its tools.

        Raises:
            RequestError: the choice names an unknown tool, or a deferred tool has no search.
        """
        if self._deferred and SEARCH not in self._named:
            raise RequestError(
                f"'{self._deferred}.defer_loading' needs a tool of type 'tool_search'.",
                param=f"{self._deferred}.defer_loading",
                code="invalid_value",
            )
        templates = self._templates
        match choice:
            case AllowedTools(mode=mode, tools=allowed):
                names = {self._known(each) for each in allowed}
                templates = {name: each for name, each in templates.items() if name in names}
                made = ToolChoice(mode)
            case ClientTool():
                made = ToolChoice("named", self._known(choice))
            case None:
                made = ToolChoice()
            case mode:
                made = ToolChoice(mode)
        return Toolbox(
            self._named,
            tuple(templates.values()),
            frozenset(self._strict),
            left_out=tuple(self._left_out),
            choice=made,
        )

    def _known(self, tool: ClientTool) -> str:
        """Return the model's name of a tool that a choice names."""
        if tool.model_name not in self._named:
            raise RequestError(
                f"'tool_choice' names '{tool.model_name}', which is not among 'tools'.",
                param="tool_choice",
                code="invalid_value",
            )
        return tool.model_name


def _pattern(syntax: str, definition: str) -> str | None:
    """Return the expression that a custom tool's text must match; None if there is none."""
    if syntax == "regex":
        return f"^(?:{definition})$"
    try:
        return f"^(?:{regular(definition)})$"
    except NotRegular:
        return None


def name_taken(param: str, name: str) -> RequestError:
    """Return the error for a second tool of one name; `param` is its path in the request."""
    said = f"'{param}' holds '{name}', which is also the name of an earlier tool."
    return RequestError(said, param=param, code="invalid_value")


def model_name(name: str, namespace: str | None) -> str:
    """Return the model's name of a tool in a namespace."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"
