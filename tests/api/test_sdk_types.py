"""The request schemas know the official SDKs' types, down to the last union."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from quire.api.chat.endpoint import ChatRequest
from quire.api.completions.endpoint import CompletionRequest
from quire.api.messages import blocks, tools
from quire.api.messages import schema as messages
from quire.api.responses import own_tools
from quire.api.responses import schema as responses
from quire.api.shared.schema import Wire
from tests.support.sdk_types import Comparison, differences

UNREAD = (
    blocks.HostedBlock,
    messages.Compact,
    own_tools.ClientRunTool,
    own_tools.HostedCallItem,
    own_tools.HostedTool,
    tools.HostedTool,
)
ASK = [{"role": "user", "content": "Hi."}]
IMAGE = {"image_url": "data:image/png;base64,AAAA"}
SAMPLES: Mapping[type[Wire], Mapping[str, Any]] = {
    ChatRequest: {"tools": {"type": "function", "function": {"name": "f"}}},
    responses.PromptFields: {
        "tools": {"type": "function", "name": "f"},
        "ResponseInputImageParam": IMAGE,
        "ResponseInputImageContentParam": IMAGE,
    },
}
Refused = Mapping[str, tuple[str, ...]]

CHAT: Refused = {
    "only text is generated": ("audio", "modalities=audio", "messages<assistant>.audio"),
    "OpenAI replaced it by tools": (
        *("functions", "function_call", "messages<function>"),
        "messages<assistant>.function_call",
    ),
    "OpenAI's servers do it": ("moderation", "web_search_options"),
}
TEXT: Refused = {"there is nothing to complete": ("prompt=null",)}
INPUT: Refused = {
    "calls are answered in order": ("input<*.async",),
    "no files are kept by id": ("input<*<input_image>.file_id", "input<*<input_image>.image_url=*"),
    "OpenAI's servers do it": (
        *("tool_choice<file_search>", "tool_choice<web_search_preview*>", "tool_choice<computer*>"),
        *("tool_choice<image_generation>", "tool_choice<code_interpreter>", "tool_choice<mcp>"),
        "tool_choice<programmatic_tool_calling>",
    ),
    "models here have one mode": ("reasoning.mode*",),
}
RESPONSES: Refused = {
    **INPUT,
    "OpenAI's account holds it": ("background_options", "image", "moderation", "prompt"),
}
BLOCKS: Refused = {
    "no files are kept by id": ("messages<user>.content<*>.source<file>",),
    "large images are always scaled down": ("messages*.transformations.oversized_image=error",),
    "no model here cites": ("messages<user>.content<document>.citations.enabled",),
    "only the assistant says it": (
        *("messages<user>.content<thinking>", "messages<user>.content<redacted_thinking>"),
        *("messages<user>.content<tool_use>", "messages<user>.content<mcp_tool_*>"),
        "messages<user>.content<compaction>",
    ),
    "the assistant does not say it": (
        *("messages<assistant>.content<image>", "messages<assistant>.content<document>"),
        *("messages<assistant>.content<search_result>", "messages<assistant>.content<tool_result>"),
    ),
    "only system messages change tools": (
        "messages<user>.content<tool_*>",
        "messages<assistant>.content<tool_*>",
    ),
    "Anthropic's toolsets are not run": (
        "messages*.content<tool_result>.content<browser_state>",
        "messages*.toolset_name",
    ),
    "Anthropic's servers do it": ("billing_policy", "compaction", "speed=fast"),
    "the SDK sends it as a header": ("betas*",),
}
MESSAGES: Refused = {
    **BLOCKS,
    "Anthropic's account holds it": (
        *("container", "fallback_credit_token", "fallbacks", "inference_geo"),
    ),
}


@pytest.mark.parametrize(
    ("schema", "params", "body", "refused"),
    [
        (ChatRequest, ChatParams, {"messages": ASK}, CHAT),
        (CompletionRequest, TextParams, {"prompt": "Hi."}, TEXT),
        (responses.ResponsesRequest, ResponseCreateParamsBase, {"input": "Hi."}, RESPONSES),
        (responses.CountRequest, InputTokenCountParams, {"input": "Hi."}, INPUT),
        (
            messages.MessagesRequest,
            MessageCreateParamsBase,
            {"messages": ASK, "max_tokens": 1},
            MESSAGES,
        ),
        (messages.CountRequest, MessageCountTokensParams, {"messages": ASK}, BLOCKS),
    ],
)
def test_fields_of_the_official_sdks_are_known_or_refused_on_purpose(
    schema: type[Wire], params: Any, body: dict[str, Any], refused: Refused
) -> None:
    """If it fails after an update of an SDK, honour the new field, or list why it is refused."""
    samples = next((SAMPLES[each] for each in SAMPLES if issubclass(schema, each)), {})
    compared = Comparison(schema, params, body, samples=samples, unread=UNREAD)
    patterns = [each for group in refused.values() for each in group]
    found = differences(compared.gaps, patterns)
    assert not found, "\n".join(found)
