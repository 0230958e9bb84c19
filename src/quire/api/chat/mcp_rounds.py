"""Chat completions with MCP tools. The field `mcp_calls` holds the calls that were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Send

from quire.api.shared.mcp_answer import MOST_ROUNDS, Answer, Asked, MakeCall, summed
from quire.api.shared.mcp_asked import AskedServer, JsonBody, MadeCall, Target, is_of_type
from quire.api.shared.mcp_openai import TYPE, asked_servers
from quire.api.shared.pieces import compact
from quire.core.errors import RequestError

_DONE = b"data: [DONE]\n\n"


def asked(fields: JsonBody) -> Sequence[AskedServer]:
    """Return the MCP servers of a request.

    Raises:
        RequestError: a field of one is wrong or unknown; `n` or `store` is asked for.
    """
    tools = fields.get("tools")
    if not isinstance(tools, list) or not isinstance(fields.get("messages"), list):
        return ()
    servers = asked_servers(tools)
    if servers and fields.get("n") not in (None, 1):
        raise RequestError("'n' must be 1 if 'tools' names MCP servers.", param="n")
    if servers and fields.get("store") is True:
        what = "'store' is not supported if 'tools' names MCP servers; use /v1/responses for that."
        raise RequestError(what, param="store", code="unsupported_parameter")
    return servers


def shown(fields: JsonBody, targets: Mapping[str, Target]) -> JsonBody:
    """Return the request with functions in place of MCP servers."""
    own = [each for each in fields["tools"] if not is_of_type(each, TYPE)]
    return {**fields, "tools": [*own, *map(_function, targets.values())]}


def _function(target: Target) -> JsonBody:
    tool = target.tool
    function = {
        "name": target.function,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


class ChatAnswer(Answer):
    """One chat completion: one head, one id, all calls, summed usage."""

    def __init__(self, asked: Asked, call: MakeCall, client: Send) -> None:
        super().__init__(asked, call, client)
        self._next = asked.shown
        self._identity: JsonBody = {}
        self._made: list[MadeCall] = []
        self._spent: JsonBody = {}
        self._start()

    def _start(self) -> None:
        self._calls: list[JsonBody] = []
        self._usage: JsonBody = {}
        self._said: JsonBody = {"role": "assistant", "content": ""}
        self._finish = ""
        self._held: list[JsonBody] = []
        self._whole: JsonBody = {}

    def request(self, number: int) -> JsonBody:
        self._start()
        return self._next

    async def event(self, data: Any, written: bytes) -> None:
        """Pass text on as it comes. Calls are held until it is known who makes them."""
        if data is None or "error" in data:
            if written != _DONE:
                await self.write(written)  # a sign of life, or an error
            return
        if not data["choices"]:
            self._usage = data["usage"]
            self._held.append(data)
            return
        choice = data["choices"][0]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            self._said[name] = self._said.get(name, "") + (delta.get(name) or "")
        for part in delta.get("tool_calls", ()):
            self._add(part)
        self._finish = choice.get("finish_reason") or self._finish
        if delta.get("tool_calls") or self._finish:
            self._held.append(data)
        else:
            await self._chunk(data)

    def _add(self, part: JsonBody) -> None:
        if part["index"] == len(self._calls):
            self._calls.append({"id": "", "type": "function", "function": {}})
        call = self._calls[part["index"]]
        call["id"] = part.get("id") or call["id"]
        for name, text in part.get("function", {}).items():
            call["function"][name] = call["function"].get(name, "") + text

    async def whole(self, body: JsonBody) -> None:
        choice = body["choices"][0]
        self._whole, self._usage = body, body["usage"]
        self._finish, self._said = choice["finish_reason"], choice["message"]
        self._calls = self._said.get("tool_calls") or []

    async def again(self, number: int) -> bool:
        if number == MOST_ROUNDS or not self._approved():
            await self._end()
            return False
        made = [
            await self.make_call(
                self.targets[call["function"]["name"]], call["function"]["arguments"]
            )
            for call in self._calls
        ]
        self._made += made
        self._spent = summed(self._spent, self._usage)
        if self.streams:
            delta = {"mcp_calls": [each.body() for each in made]}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            await self._chunk({"object": "chat.completion.chunk", "choices": [choice]})
        self._next = {
            **self._next,
            "tool_choice": "auto",  # what had to be called has been called
            "messages": [*self._next["messages"], *self._messages(made)],
        }
        return True

    def _approved(self) -> bool:
        """Return whether the round ended with calls, and this server makes all of them."""
        found = [self.targets.get(each["function"].get("name")) for each in self._calls]
        approved = all(each is not None and each.approved for each in found)
        return self._finish == "tool_calls" and bool(found) and approved

    def _messages(self, made: list[MadeCall]) -> list[JsonBody]:
        """Return the messages that the next round adds to this one's."""
        said = {name: self._said[name] for name in ("role", "content") if self._said.get(name)}
        if reasoning := self._said.get("reasoning_content"):
            said["reasoning_content"] = reasoning
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": each.told()}
            for call, each in zip(self._calls, made, strict=True)
        ]
        return [{**said, "tool_calls": self._calls}, *results]

    async def _end(self) -> None:
        """Send what was held back, because this round is the last one."""
        if not self.streams:
            message = self._whole["choices"][0]["message"]
            message["mcp_calls"] = [each.body() for each in self._made]
            self._whole["usage"] = summed(self._spent, self._usage)
            await self.respond(compact(self._whole))
            return
        for chunk in self._held:
            if not chunk["choices"]:
                chunk = {**chunk, "usage": summed(self._spent, chunk["usage"])}
            await self._chunk(chunk)
        await self.write(_DONE, more=False)

    async def _chunk(self, chunk: Mapping[str, Any]) -> None:
        """Send a chunk of a stream, with the id of the first round."""
        if not self._identity:
            self._identity = {name: chunk.get(name) for name in ("id", "created", "model")}
        await self.write(b"data: " + compact({**chunk, **self._identity}) + b"\n\n")

    def error_event(self, body: JsonBody) -> bytes:
        return b"data: " + compact(body) + b"\n\n" + _DONE
