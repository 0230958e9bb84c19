"""Messages with MCP tools: blocks `mcp_tool_use` and `mcp_tool_result`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from starlette.types import Send

from quire.api.messages.blocks import CacheControl
from quire.api.messages.render import MessageFold
from quire.api.shared.mcp_answer import MOST_ROUNDS, Answer, Asked, MakeCall, summed
from quire.api.shared.mcp_asked import AskedServer, JsonBody, MadeCall, Target, is_of_type, parsed
from quire.api.shared.pieces import compact
from quire.api.shared.schema import Wire
from quire.core.errors import NotFound
from quire.serving.mcp import McpTool

_TOOLSET = "mcp_toolset"


class ToolConfig(Wire):
    """Whether a tool is offered. Tools whose loading is deferred are offered at once."""

    enabled: bool | None = None
    defer_loading: bool | None = None


class ToolConfiguration(Wire):
    """The tools of a server in the older form, within `mcp_servers`."""

    enabled: bool | None = None
    allowed_tools: list[str] | None = None


class McpServerDefinition(Wire):
    """An entry of `mcp_servers`: a server that the operator has named."""

    type: Literal["url"]
    name: str
    url: str | None = None
    tool_configuration: ToolConfiguration | None = None


class McpToolset(Wire):
    """A tool of type `mcp_toolset`: the tools of one server."""

    type: Literal["mcp_toolset"]
    mcp_server_name: str
    default_config: ToolConfig | None = None
    configs: dict[str, ToolConfig] | None = None
    cache_control: CacheControl | None = None

    def offers(self, tool: McpTool) -> bool:
        """Return whether the model sees a tool."""
        for config in ((self.configs or {}).get(tool.name), self.default_config):
            if config is not None and config.enabled is not None:
                return config.enabled
        return True


def asked(fields: JsonBody) -> Sequence[AskedServer]:
    """Return the MCP servers of a request. A toolset may name one without an entry of its own.

    Raises:
        RequestError: a field is wrong or unknown.
    """
    given, tools = fields.get("mcp_servers"), fields.get("tools")
    entries = [
        parsed(McpServerDefinition, each, f"mcp_servers[{index}]")
        for index, each in enumerate(given if isinstance(given, list) else ())
    ]
    places = {each.name: (index, each) for index, each in enumerate(entries)}
    found = []
    named = set()
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not is_of_type(tool, _TOOLSET):
            continue
        where = f"tools[{index}]"
        toolset = parsed(McpToolset, tool, where)
        name = toolset.mcp_server_name
        named.add(name)
        if entries and name not in places:
            what = f"'{where}.mcp_server_name' is '{name[:80]}', which 'mcp_servers' lacks."
            raise NotFound(what, param=f"{where}.mcp_server_name")
        index, entry = places.get(name, (0, None))
        found.append(
            AskedServer(
                name,
                (f"{where}.mcp_server_name", f"mcp_servers[{index}].url", f"{where}.configs"),
                url="" if entry is None else entry.url or "",
                allowed=toolset.offers,
                names=list(toolset.configs or ()),
            )
        )
    bare = [(n, each) for n, each in enumerate(entries) if each.name not in named]
    return [*found, *(_without_toolset(each, n) for n, each in bare)]


def _without_toolset(entry: McpServerDefinition, index: int) -> AskedServer:
    """Return a server whose tools the entry itself chooses."""
    config = entry.tool_configuration or ToolConfiguration()
    names = config.allowed_tools

    def allowed(tool: McpTool) -> bool:
        return config.enabled is not False and (names is None or tool.name in names)

    where = f"mcp_servers[{index}]"
    params = (f"{where}.name", f"{where}.url", f"{where}.tool_configuration.allowed_tools")
    return AskedServer(entry.name, params, url=entry.url or "", allowed=allowed, names=names or ())


def shown(fields: JsonBody, targets: Mapping[str, Target]) -> JsonBody:
    """Return the request with functions in place of MCP servers."""
    own = [each for each in fields.get("tools") or () if not is_of_type(each, _TOOLSET)]
    functions = [
        {
            "name": each.function,
            "description": each.tool.description,
            "input_schema": each.tool.parameters,
        }
        for each in targets.values()
    ]
    result = {name: value for name, value in fields.items() if name != "mcp_servers"}
    return {**result, "tools": [*own, *functions]}


class MessagesAnswer(Answer):
    """One message: numbered blocks, all calls with their results, summed usage."""

    def __init__(self, asked: Asked, call: MakeCall, client: Send) -> None:
        super().__init__(asked, call, client)
        self._next = asked.shown
        self._content: list[JsonBody] = []
        self._usage: JsonBody = {}
        self._message: JsonBody = {}
        self._round: JsonBody = {}
        self._start()

    def _start(self) -> None:
        self._base = len(self._content)
        self._fold = MessageFold()
        self._end: JsonBody = {}

    def request(self, number: int) -> JsonBody:
        self._start()
        return self._next

    async def event(self, data: Any, written: bytes) -> None:
        """Pass an event on, as one of the whole message. A round's end is held back."""
        kind = None if data is None else data["type"]
        if kind in (None, "ping", "error"):
            await self.write(written)
            return
        self._fold.add(data)
        if kind == "message_start":
            if not self._message:
                self._message = data["message"]
                await self._send(data)
        elif kind == "message_delta":
            self._end = data
        elif kind == "content_block_start":
            block = self._as_mcp(data["content_block"])
            await self._send({**data, "index": self._base + data["index"], "content_block": block})
        elif "index" in data:
            await self._send({**data, "index": self._base + data["index"]})

    def _as_mcp(self, block: JsonBody) -> JsonBody:
        """Return a block of the client's answer, in which calls of MCP tools are marked as such."""
        target = self.targets.get(block["name"]) if block["type"] == "tool_use" else None
        if target is None:
            return block
        return {
            "type": "mcp_tool_use",
            "id": "mcp" + block["id"],
            "name": target.tool.name,
            "server_name": target.server,
            "input": block["input"],
        }

    async def whole(self, body: JsonBody) -> None:
        self._message = self._message or body
        self._round = body

    async def again(self, number: int) -> bool:
        """Make the calls. Go on if the round ended with calls of this server alone."""
        round_ = self._fold.message() if self.streams else self._round
        content = self._fold.content if self.streams else self._round["content"]
        self._usage = summed(self._usage, round_["usage"])
        blocks = [self._as_mcp(each) for each in content]
        calls = round_["stop_reason"] == "tool_use"
        used = [
            (self.targets[said["name"]], block)
            for said, block in zip(content, blocks, strict=True)
            if block["type"] == "mcp_tool_use"
        ]
        self._content += blocks
        for target, block in used if calls else ():
            result = _result(block, await self.make_call(target, compact(block["input"]).decode()))
            for event in _sent_block(result, len(self._content)):
                await self._send(event)
            self._content.append(result)
        own = any(each["type"] == "tool_use" for each in blocks)
        if not calls or own or not used:
            await self._finish(round_["stop_reason"], round_)
            return False
        if number == MOST_ROUNDS:
            await self._finish("pause_turn", round_)
            return False
        said = {"role": "assistant", "content": self._content}
        self._next = {**self._next, "messages": [*self.fields["messages"], said]}
        choice = self._next.get("tool_choice")
        if isinstance(choice, dict):  # what had to be called has been called
            kept = {name: value for name, value in choice.items() if name != "name"}
            self._next["tool_choice"] = {**kept, "type": "auto"}
        return True

    async def _finish(self, reason: str, last: JsonBody) -> None:
        """Send the end of the message."""
        if not self.streams:
            body = {**last, "id": self._message["id"], "content": self._content}
            await self.respond(compact({**body, "stop_reason": reason, "usage": self._usage}))
            return
        delta = {**self._end["delta"], "stop_reason": reason}
        await self._send({**self._end, "delta": delta, "usage": self._usage})
        await self._send({"type": "message_stop"})
        await self.write(b"", more=False)

    async def _send(self, event: JsonBody) -> None:
        if self.streams:
            written = f"event: {event['type']}\ndata: ".encode() + compact(event) + b"\n\n"
            await self.write(written)

    def error_event(self, body: JsonBody) -> bytes:
        return b"event: error\ndata: " + compact(body) + b"\n\n"


def _result(block: JsonBody, made: MadeCall) -> JsonBody:
    return {
        "type": "mcp_tool_result",
        "tool_use_id": block["id"],
        "is_error": made.failed,
        "content": [{"type": "text", "text": made.output}],
    }


def _sent_block(block: JsonBody, index: int) -> Iterator[JsonBody]:
    """Yield the events of a block that is sent as a whole."""
    yield {"type": "content_block_start", "index": index, "content_block": block}
    yield {"type": "content_block_stop", "index": index}
