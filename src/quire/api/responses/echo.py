"""The request fields that a response repeats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire.api.responses.configuration import Configuration, Reasoning, TextFormat
from quire.api.responses.items import WireEvent
from quire.api.responses.own_tools import HostedTool
from quire.api.responses.schema import FunctionTool, ResponsesRequest
from quire.core.ids import new_id
from quire.core.request import SamplingParams


def asked_summary(reasoning: Reasoning | None) -> str | None:
    """Return the requested kind of reasoning summary."""
    return None if reasoning is None else reasoning.summary or reasoning.generate_summary


def constant_part(
    name: str,
    fields: ResponsesRequest,
    configuration: Configuration,
    *,
    sampling: SamplingParams,
    dropped: Sequence[str],
) -> WireEvent:
    """Return the request fields that a response repeats, as they were understood."""
    conversation = fields.conversation_id
    wanted = configuration.text or TextFormat(type="text")
    body: WireEvent = {
        "id": f"resp_{new_id()}",
        "object": "response",
        "created_at": int(time.time()),
        "background": fields.background is True,
        "conversation": None if conversation is None else {"id": conversation},
        "frequency_penalty": sampling.frequency_penalty,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": name,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": configuration.effort,
            "summary": asked_summary(fields.reasoning),
            "context": "auto",
        },
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": _dump(wanted), "verbosity": "medium"},
        "tool_choice": "auto" if fields.tool_choice is None else _dump(fields.tool_choice),
        "tools": [_told(each) for each in fields.tools or () if not isinstance(each, HostedTool)],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }
    if dropped:
        body["input_transformations"] = [
            {"type": "reasoning", "id": each, "action": "removed", "reason": "model_mismatch"}
            for each in dropped
        ]
    return body


def _told(tool: Any) -> WireEvent:
    """Return a tool as a response repeats it, with the fields that OpenAI's schema requires."""
    told: WireEvent = _dump(tool)
    if isinstance(tool, FunctionTool):
        told = {"description": None, "parameters": None, "strict": False} | told
    return told


def _dump(value: Any) -> Any:
    """Return a part of the request as the client spelled it."""
    return value if isinstance(value, str) else value.model_dump(by_alias=True, exclude_unset=True)
