"""Responses with MCP tools: items `mcp_list_tools`, `mcp_call` and `mcp_approval_request`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Send

from quire.api.responses.mcp_approvals import Approvals
from quire.api.responses.store import ResponseStore, Stored
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.mcp_answer import MOST_ROUNDS, Answer, Asked, MakeCall, summed
from quire.api.shared.mcp_asked import AskedServer, JsonBody, MadeCall, Target, is_of_type
from quire.api.shared.mcp_calls import function_name
from quire.api.shared.mcp_openai import TYPE, asked_servers
from quire.api.shared.pieces import compact
from quire.core.errors import RequestError

_SAID = frozenset({"message", "reasoning"})


def asked(fields: JsonBody) -> Sequence[AskedServer]:
    """Return the MCP servers of a request.

    Raises:
        RequestError: a field of one is wrong or unknown, or `background` is set.
    """
    tools = fields.get("tools")
    servers = asked_servers(tools) if isinstance(tools, list) else []
    if servers and fields.get("background") is True:
        what = "'background' is not supported if 'tools' names MCP servers."
        raise RequestError(what, param="background", code="unsupported_parameter")
    return servers


def shown(fields: JsonBody, targets: Mapping[str, Target]) -> JsonBody:
    """Return the request with functions in place of MCP servers, in `tool_choice`, too."""
    own = [each for each in fields["tools"] if not is_of_type(each, TYPE)]
    result = {**fields, "tools": [*own, *map(_function, targets.values())]}
    choice = fields.get("tool_choice")
    if is_of_type(choice, TYPE):
        result["tool_choice"] = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": _chosen(choice, targets),
        }
    elif is_of_type(choice, "allowed_tools") and isinstance(choice.get("tools"), list):
        named = [
            function
            for each in choice["tools"]
            for function in (_chosen(each, targets) if is_of_type(each, TYPE) else [each])
        ]
        result["tool_choice"] = {**choice, "tools": named}
    return result


def _function(target: Target) -> JsonBody:
    tool = target.tool
    return {
        "type": "function",
        "name": target.function,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": False,
    }


def _chosen(choice: Mapping[str, Any], targets: Mapping[str, Target]) -> list[JsonBody]:
    """Return the functions of a choice of type `mcp`: of one tool, or of a whole server.

    Raises:
        RequestError: the request's tools hold none of these.
    """
    server, name = choice.get("server_label"), choice.get("name")
    found = [
        {"type": "function", "name": function}
        for function, target in targets.items()
        if target.server == server and name in (None, target.tool.name)
    ]
    if not found:
        what = "'tool_choice' does not name a tool of an MCP server among 'tools'."
        raise RequestError(what, param="tool_choice", code="invalid_value")
    return found


class ResponsesAnswer(Answer):
    """One response: one id, numbered events, all items, summed usage.

    Args:
        store: the caller's responses.
    """

    def __init__(self, asked: Asked, call: MakeCall, client: Send, store: ResponseStore) -> None:
        super().__init__(asked, call, client)
        self._store = store
        self._approvals = Approvals(asked.fields, asked.targets, store)
        self._opening = self._approvals.listed()
        self._next = {**asked.shown, **self._approvals.request()}
        self._complete = False
        self._sent = self._made = self._base = 0
        self._output: list[JsonBody] = []
        self._first: JsonBody = {}
        self._usage: JsonBody = {}
        self._last: JsonBody = {}
        self._open: dict[int, JsonBody] = {}  # calls of this round, by their index in it

    async def open(self) -> None:
        """Make the calls that the user has approved since the last response."""
        for request, target in self._approvals.approved():
            item = _call_item(target, request["id"])
            item["arguments"] = request["arguments"]
            _finish(item, await self.make_call(target, request["arguments"]))
            self._made += 1
            self._opening.append(item)
        self._next["input"] = [*self._next["input"], *self._opening]

    def request(self, number: int) -> JsonBody:
        self._base = len(self._output) + (len(self._opening) if number == 0 else 0)
        self._open = {}
        if self._used_up(number):
            return {**self._next, "tool_choice": "none"}
        return self._next

    def _used_up(self, number: int) -> bool:
        """Return whether no call may follow."""
        most = self.fields.get("max_tool_calls")
        return number >= MOST_ROUNDS or (most is not None and self._made >= most)

    async def event(self, data: Any, written: bytes) -> None:
        """Pass an event on, as one of the whole response."""
        if data is None:
            await self.write(written)
            return
        match data["type"]:
            case "response.created":
                if not self._first:
                    self._first = data["response"]
                    await self._send({**data, "response": self._merged(self._first)})
            case "response.in_progress":
                await self._send({**data, "response": self._merged(self._first)})
                await self._send_opening()
            case "response.completed" | "response.incomplete" | "response.failed":
                self._last = data["response"]
            case _ if "output_index" in data:
                await self._item_event(data, data["output_index"])
            case _:
                await self._send(data)

    async def _item_event(self, data: JsonBody, index: int) -> None:
        """Pass on an event of one item. Those of a function that is an MCP tool are renamed."""
        kind, place = data["type"], self._base + index
        if kind == "response.output_item.added" and (target := self._target(data["item"])):
            self._open[index] = item = _call_item(target)
            if target.approved:
                await self._send({**data, "output_index": place, "item": item})
                await self._send(_of_call("in_progress", item, place))
            return
        item = self._open.get(index, {})
        if not item:
            await self._send({**data, "output_index": place})
        elif "arguments" in kind and self._approved(item):
            renamed = kind.replace("function_call_arguments", "mcp_call_arguments")
            event = {**data, "type": renamed, "output_index": place, "item_id": item["id"]}
            event.pop("name", None)
            await self._send(event)

    async def whole(self, body: JsonBody) -> None:
        self._first = self._first or body
        self._last = body
        await self._send_opening()

    async def again(self, number: int) -> bool:
        """Make the approved calls. Go on if the round ended with calls of this server alone."""
        complete = self._last["status"] == "completed"
        self._usage = summed(self._usage, self._last["usage"] or {})
        items = [
            await self._item(index, said, run=complete and not self._used_up(number))
            for index, said in enumerate(self._last["output"])
        ]
        self._output += items
        calls_alone = {each["type"] for each in items} - _SAID == {"mcp_call"}
        if not complete or not calls_alone or number >= MOST_ROUNDS:
            await self._end()
            return False
        self._next = {
            **self._next,
            "input": [*self._next["input"], *items],
            "store": False,
            "tool_choice": "auto",  # what had to be called has been called
        }
        return True

    async def _item(self, index: int, said: JsonBody, *, run: bool) -> JsonBody:
        """Return an item of a round as the client gets it; make its call if `run`."""
        target = self._target(said)
        if target is None:
            return said
        place = self._base + index
        item = self._open.get(index) or _call_item(target)
        item["arguments"] = said["arguments"]
        if run and not target.approved:
            item = _approval_request(item)
        elif run:
            self._made += 1
            _finish(item, await self.make_call(target, said["arguments"]))
        else:
            item["status"] = "incomplete"
        if not target.approved:
            added = {"type": "response.output_item.added", "output_index": place, "item": item}
            await self._send(added)
        elif item["status"] != "incomplete":
            await self._send(_of_call(item["status"], item, place))
        await self._send({"type": "response.output_item.done", "output_index": place, "item": item})
        return item

    async def _send_opening(self) -> None:
        """Send the items that come before the first round's, once."""
        for item in self._opening[len(self._output) :]:
            place = len(self._output)
            kind = item["type"]
            started = {**item, "tools": []} if kind == "mcp_list_tools" else item
            for event in (
                {"type": "response.output_item.added", "output_index": place, "item": started},
                _of_call("in_progress", item, place),
                _of_call(item.get("status", "completed"), item, place),
                {"type": "response.output_item.done", "output_index": place, "item": item},
            ):
                await self._send(event)
            self._output.append(item)

    def _target(self, item: JsonBody) -> Target | None:
        """Return the MCP tool that an item calls, if any."""
        if item["type"] != "function_call" or item.get("namespace"):
            return None
        return self.targets.get(item["name"])

    def _approved(self, item: JsonBody) -> bool:
        return self.targets[function_name(item["server_label"], item["name"])].approved

    def _merged(self, response: JsonBody, **changed: Any) -> JsonBody:
        """Return a round's response as the client's, whose request it repeats."""
        own = [each for each in response["tools"] if each.get("name") not in self.targets]
        servers = [each for each in self.fields["tools"] if is_of_type(each, TYPE)]
        named = self._approvals.conversation
        same = {
            **{name: self._first[name] for name in ("id", "created_at")},
            "conversation": None if named is None else {"id": named},
            "store": self._stored,
            "tools": [*servers, *own],
            "tool_choice": self.fields.get("tool_choice") or "auto",
        }
        return {**response, **same, **changed}

    @property
    def _stored(self) -> bool:
        return self.fields.get("store") is not False

    async def _end(self) -> None:
        """Send the whole response, and store it in place of the first round's."""
        body = self._merged(self._last, output=self._output, usage=self._usage or None)
        kept = self._store.get(body["id"])
        if kept is not None and body["status"] != "failed":
            self._keep(body, kept)
        if not self.streams:
            await self.respond(compact(body))
            return
        await self._send({"type": f"response.{body['status']}", "response": body})
        await self.write(b"", more=False)

    def _keep(self, body: JsonBody, kept: Stored) -> None:
        """Store the response if the client wants it, and let it join its conversation.

        Args:
            kept: the first round, whose input holds items that the response opens with.
        """
        output = [StoredItem.of_answer(each) for each in self._output]
        opened = {each.id for each in output}
        said = [each for each in kept.said if each.id not in opened]
        if self._stored:
            self._store.add(body["id"], [compact(body)], said, output=output)
            self._complete = True
        if self._approvals.conversation is not None:
            new = [each for each in said if each.id not in self._approvals.earlier]
            self._store.extend(self._approvals.conversation, (*new, *output))

    def close(self) -> None:
        if self._first and not self._complete:
            self._store.remove(self._first["id"])  # the first round, which is no whole response

    async def _send(self, event: JsonBody) -> None:
        if self.streams:
            await self.write(self._written(event))

    def _written(self, event: JsonBody) -> bytes:
        numbered = {**event, "sequence_number": self._sent}
        self._sent += 1
        return f"event: {event['type']}\ndata: ".encode() + compact(numbered) + b"\n\n"

    def error_event(self, body: JsonBody) -> bytes:
        error = {name: body["error"][name] for name in ("code", "message")}
        changed = {"status": "failed", "error": error, "output": self._output}
        response = self._merged(self._first, **changed)
        return self._written({"type": "response.failed", "response": response})


def _call_item(target: Target, approval_request_id: str | None = None) -> JsonBody:
    """Return the item of a call that is still to be made."""
    return {
        "id": f"mcp_{uuid.uuid4().hex}",
        "type": "mcp_call",
        "status": "in_progress",
        "approval_request_id": approval_request_id,
        "arguments": "",
        "error": None,
        "name": target.tool.name,
        "output": None,
        "server_label": target.server,
    }


def _approval_request(item: JsonBody) -> JsonBody:
    """Return the item that asks the user whether to make a call."""
    return {
        "id": f"mcpr_{uuid.uuid4().hex}",
        "type": "mcp_approval_request",
        **{name: item[name] for name in ("arguments", "name", "server_label")},
    }


def _finish(item: JsonBody, made: MadeCall) -> None:
    """Enter a call's output, or its error."""
    item["status"] = "failed" if made.failed else "completed"
    if made.failed:
        content = [{"type": "text", "text": made.output}]
        item["error"] = {"type": "mcp_tool_execution_error", "content": content}
    else:
        item["output"] = made.output


def _of_call(state: str, item: JsonBody, place: int) -> JsonBody:
    """Return a progress event of a call or of a listing of tools."""
    kind = f"response.{item['type']}.{state}"
    return {"type": kind, "item_id": item["id"], "output_index": place}
