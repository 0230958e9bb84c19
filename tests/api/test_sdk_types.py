"""The request schemas know the official SDKs' types, down to the last union."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai.types.audio.transcription_create_params import (
    TranscriptionCreateParamsBase as TranscriptionParams,
)
from openai.types.audio.translation_create_params import TranslationCreateParams
from openai.types.batch_create_params import BatchCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.conversations.conversation_create_params import ConversationCreateParams
from openai.types.conversations.item_create_params import ItemCreateParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_compact_params import ResponseCompactParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from quire.api.audio.requests import TranscriptionRequest, TranslationRequest
from quire.api.batches.endpoint import BatchRequestFields
from quire.api.chat.endpoint import ChatRequest
from quire.api.completions.endpoint import CompletionRequest
from quire.api.embeddings.endpoint import EmbeddingRequest
from quire.api.messages import blocks, tools
from quire.api.messages import schema as messages
from quire.api.responses import own_tools
from quire.api.responses import schema as responses
from quire.api.responses.conversations import ConversationFields, ItemsFields
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
ITEM_SAMPLES = {
    "tools": {"type": "function", "name": "f"},
    "ResponseInputImageParam": IMAGE,
    "ResponseInputImageContentParam": IMAGE,
}
SAMPLES: Mapping[type[Wire], Mapping[str, Any]] = {
    ChatRequest: {"tools": {"type": "function", "function": {"name": "f"}}},
    responses.PromptFields: ITEM_SAMPLES,
    ConversationFields: ITEM_SAMPLES,
    ItemsFields: ITEM_SAMPLES,
    BatchRequestFields: {"seconds": 3600},
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


def items_at(field: str) -> Refused:
    """Return what is refused of a list of items."""
    image = f"{field}<*<input_image>"
    return {
        "calls are answered in order": (f"{field}<*.async",),
        "no files are kept by id": (f"{image}.file_id", f"{image}.image_url=*"),
    }


INPUT: Refused = {
    **items_at("input"),
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
COMPACT: Refused = {**items_at("input"), "OpenAI's account holds it": ("image",)}
ITEMS = items_at("items")
SPEECH: Refused = {
    "words have no times": ("timestamp_granularities=word",),
    "pieces end where it is quiet": ("chunking_strategy<server_vad>",),
    "log-probabilities are not given": ("include",),
    "speakers are not told apart": ("known_speaker_*", "response_format=diarized_json"),
    "language and prompt say it": ("languages", "keywords"),
}
BATCH: Refused = {
    "only text is generated": (
        *("endpoint=/v1/moderations", "endpoint=/v1/images/*", "endpoint=/v1/videos"),
    ),
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
        (responses.CompactRequest, ResponseCompactParams, {"input": "Hi."}, COMPACT),
        (ConversationFields, ConversationCreateParams, {}, ITEMS),
        (
            ItemsFields,
            ItemCreateParams,
            {"items": ASK},
            {**ITEMS, "the SDK sends it in the query": ("include",)},
        ),
        (EmbeddingRequest, EmbeddingCreateParams, {"input": "Hi."}, {}),
        (TranscriptionRequest, TranscriptionParams, {"sound": ""}, SPEECH),
        (TranslationRequest, TranslationCreateParams, {"sound": ""}, {}),
        (
            BatchRequestFields,
            BatchCreateParams,
            {"input_file_id": "x", "endpoint": "/v1/responses"},
            BATCH,
        ),
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
