"""`/v1/responses/{id}/input_items`, through the official SDK."""

from __future__ import annotations

from typing import Any, cast

import pytest
from openai import BadRequestError, NotFoundError
from openai.types.responses import (
    ResponseCustomToolCallItem,
    ResponseCustomToolCallOutputItem,
    ResponseFunctionToolCallItem,
    ResponseFunctionToolCallOutputItem,
    ResponseInputMessageItem,
    ResponseItem,
    ResponseItemList,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseToolSearchCall,
    ResponseToolSearchOutputItem,
)
from openai.types.responses.input_item_list_params import InputItemListParams
from openai.types.responses.response_item import AdditionalTools
from pydantic import TypeAdapter

from quire.api.responses.listing import ItemsQuery
from tests.api.conftest import HTTP, Serve, Served, openai_client

_LIST: TypeAdapter[Any] = TypeAdapter(ResponseItemList)
TOOL: Any = {"type": "function", "name": "f", "parameters": {}, "strict": None}
OF_EVERY_KIND: Any = [
    (ResponseInputMessageItem, {"role": "developer", "content": "Be brief."}),
    (ResponseInputMessageItem, {"role": "user", "content": [{"type": "text", "text": "Hi."}]}),
    (ResponseReasoningItem, {"type": "reasoning", "content": [{"type": "text", "text": "Hm."}]}),
    (ResponseOutputMessage, {"role": "assistant", "content": "Yes?"}),
    (AdditionalTools, {"type": "additional_tools", "role": "developer", "tools": [TOOL]}),
    (
        ResponseFunctionToolCallItem,
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": {"x": "é"}},
    ),
    (
        ResponseFunctionToolCallOutputItem,
        {"type": "function_call_output", "call_id": "a", "output": "4"},
    ),
    (
        ResponseCustomToolCallItem,
        {"type": "custom_tool_call", "call_id": "b", "name": "c", "input": "x"},
    ),
    (
        ResponseCustomToolCallOutputItem,
        {
            "type": "custom_tool_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "5"}],
        },
    ),
    (
        ResponseToolSearchCall,
        {"type": "tool_search_call", "call_id": "d", "execution": "client", "arguments": {}},
    ),
    (
        ResponseToolSearchOutputItem,
        {"type": "tool_search_output", "call_id": "d", "execution": "client", "tools": [TOOL]},
    ),
    (ResponseInputMessageItem, {"role": "user", "content": "Bye."}),
]


def answered(served: Served, **fields: Any) -> Any:
    return openai_client(served.url).responses.create(model="quire-demo", **fields)


def page(served: Served, response_id: str, **query: Any) -> Any:
    return openai_client(served.url).responses.input_items.list(response_id, **query)


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def test_every_parameter_of_the_official_sdk_is_known() -> None:
    assert set(InputItemListParams.__annotations__) == set(ItemsQuery.model_fields)


def test_items_of_every_kind_are_valid_for_the_sdk(serve: Serve) -> None:
    served = serve("Hello.")
    response = answered(served, input=[item for _, item in OF_EVERY_KIND], store=True)
    url = f"{served.url}/v1/responses/{response.id}/input_items?order=asc"
    listed = HTTP.get(url).json()
    _LIST.validate_python(listed)
    read = [cast("ResponseItem", item) for item in page(served, response.id, order="asc")]
    for (kind, sent), raw, item in zip(OF_EVERY_KIND, listed["data"], read, strict=True):
        TypeAdapter(kind).validate_python(raw)
        assert isinstance(item, kind), raw
        assert raw["type"] == sent.get("type", "message")
        assert raw["id"]
    assert texts([read[0], read[1], read[3]]) == ["Be brief.", "Hi.", "Yes?"]
    assert [part["type"] for raw in listed["data"] for part in raw.get("content", ())] == [
        *("input_text", "input_text", "reasoning_text", "output_text", "input_text")
    ]
    assert listed["data"][5]["arguments"] == '{"x": "é"}'


def test_what_is_listed_makes_the_same_prompt(serve: Serve) -> None:
    served = serve("Hello.")
    first = answered(served, input=[item for _, item in OF_EVERY_KIND])
    answered(served, input=listed_items(served, first.id))
    assert served.engine.requests[0].prompt == served.engine.requests[1].prompt


def listed_items(served: Served, response_id: str) -> Any:
    url = f"{served.url}/v1/responses/{response_id}/input_items?order=asc&limit=100"
    return HTTP.get(url).json()["data"]


def test_earlier_turns_are_listed_newest_first(serve: Serve) -> None:
    served = serve("Hello.")
    first = answered(served, input="One.")
    second = answered(served, input="Two.", previous_response_id=first.id)
    listed = page(served, second.id).data
    assert texts(listed) == ["Two.", "Hello.", "One."]
    assert listed[1].id == first.output[0].id
    assert texts(page(served, second.id, order="asc")) == ["One.", "Hello.", "Two."]
    assert [item.id for item in page(served, first.id)] == [listed[2].id]
    assert answered(served, input=[{"type": "item_reference", "id": listed[2].id}]).output


def test_pages(serve: Serve) -> None:
    served = serve("Hello.")
    words = [f"{number}." for number in range(45)]
    same: Any = {"id": "msg_same", "role": "user", "content": "Again."}  # an id names one item
    items: Any = [*({"role": "user", "content": word} for word in words), same, same]
    response = answered(served, input=items)
    said = [*words, "Again.", "Again."]
    for query in ({}, {"limit": 1}, {"limit": 47}, {"limit": 100}):
        assert texts(page(served, response.id, order="asc", **query)) == said
        assert texts(page(served, response.id, order="desc", **query)) == said[::-1]
    assert len(page(served, response.id).data) == 20
    kept = page(served, response.id, order="asc", limit=100).data
    url = f"{served.url}/v1/responses/{response.id}/input_items?limit=2&order=asc"
    middle = HTTP.get(f"{url}&after={kept[4].id}&include[]=message.output_text.logprobs").json()
    assert (middle["object"], middle["has_more"]) == ("list", True)
    assert [middle["first_id"], middle["last_id"]] == [kept[5].id, kept[6].id]
    last = HTTP.get(f"{url}&after={kept[-1].id}").json()
    assert last == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    assert kept[45].id == "msg_same" != kept[46].id


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"include": ["x"]}]
)
def test_parameters_that_are_wrong_are_named(serve: Serve, query: Any) -> None:
    served = serve("Hello.")
    response = answered(served, input="Hi.")
    (name,) = query
    with pytest.raises(BadRequestError) as refused:
        page(served, response.id, **query)
    assert str(refused.value.param).startswith(name)


def test_what_is_not_kept_is_not_there(serve: Serve) -> None:
    served = serve("Hello.")
    response = answered(served, input="Hi.")
    with pytest.raises(NotFoundError, match="no item 'msg_x'"):
        page(served, response.id, after="msg_x")
    for gone in ("resp_x", answered(served, input="Hi.", store=False).id):
        with pytest.raises(NotFoundError, match="no response"):
            page(served, gone)
