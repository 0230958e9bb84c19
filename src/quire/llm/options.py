"""Options of a request from Python, and their conversion to a `Generation`.

They are the fields of the HTTP API and validated by its schemas, so both mean the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from pydantic import BaseModel
from starlette.requests import Request

from quire.api.chat.endpoint import ChatRequest
from quire.api.chat.tools import toolbox
from quire.api.completions.endpoint import CompletionRequest
from quire.api.shared.access import ignored_fields
from quire.api.shared.context import Context
from quire.api.shared.schema import parse
from quire.api.shared.toolbox import Toolbox
from quire.core.errors import RequestError
from quire.core.speculation import Speculation
from quire.llm.media import with_urls
from quire.serving.generation import Generation

Prompt = str | Sequence[int]
"""A text, before which the tokenizer's start tokens are added, or token ids, which are used as they
are.
"""
Messages = str | Sequence[Mapping[str, Any]]
"""The user's message, or a conversation in OpenAI's form; for media, see `with_urls`."""


class Options(TypedDict, total=False):
    """Options of one request. Options left out have the model's defaults.

    Attributes:
        max_tokens: the most tokens of the answer; default: the room left in the context.
        stop: texts that end the answer.
        n: number of choices.
        seed: seed of the sampler; an answer with a seed is the same in any batch.
        logprobs: number of alternatives to report for each token; 0 reports only the tokens.
        schema: a pydantic class or JSON schema that the answer must satisfy.
        regex, choice, grammar: other constraints of the answer.
        kv_bits, kv_scheme: KV format of this request.
        speculation: the drafter: "auto", "off", "ngram", "mtp" or "draft".
        priority: lower numbers go first; 0 is the default.
        cache_salt: prefixes are shared only among requests with the same salt.
    """

    max_tokens: int
    min_tokens: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    seed: int
    n: int
    logprobs: int
    allowed_token_ids: list[int]
    bad_words: list[str]
    stop_on_loop: int
    speculation: Speculation
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    schema: type[BaseModel] | dict[str, Any]
    regex: str
    choice: list[str]
    grammar: str
    kv_bits: float | str
    kv_scheme: str
    priority: int
    cache_salt: str


class ChatOptions(Options, total=False):
    """Options of a conversation, beside `Options`; all fields of `/v1/chat/completions` are
    accepted.

    Attributes:
        tools, tool_choice, parallel_tool_calls: as in OpenAI's API.
        enable_thinking, thinking_budget, reasoning_effort: whether and how long to reason.
        chat_template_kwargs: variables of the chat template.
        continue_final_message: whether to continue the last message.
    """

    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    enable_thinking: bool
    thinking_budget: int
    reasoning_effort: str
    chat_template_kwargs: dict[str, Any]
    continue_final_message: bool


def completion(context: Context, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
    """Return the `Generation` that `options` ask for, for a prompt without a chat template.

    Raises:
        RequestError: an option is unknown or cannot be honoured.
    """
    asked = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
    body = {**_fields(options), "prompt": asked}
    request = _request()
    fields = _parsed(CompletionRequest, body)
    if fields.choices() > (fields.n or 1):
        raise RequestError(
            "'best_of' above 'n' is for /v1/completions: use n, and logprobs to rank the answers.",
            param="best_of",
            code="unsupported_parameter",
        )
    return _finished(fields.generation(context, request), request, options)


def chat(context: Context, messages: Messages, options: Mapping[str, Any]) -> Generation:
    """Return the `Generation` that `options` ask for, for a conversation.

    Raises:
        RequestError: as for `completion`, or a message cannot be used.
    """
    body = {**_fields(options), "messages": with_urls(messages)}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    request = _request()
    fields = _parsed(ChatRequest, body)
    tools: Toolbox = toolbox(fields.tools, fields.tool_choice)
    return _finished(fields.generation(context, request, tools), request, options)


def parsed_as(options: Mapping[str, Any]) -> type[BaseModel] | None:
    """Return the pydantic class that `options` give as schema; None if there is none."""
    schema = options.get("schema")
    return schema if isinstance(schema, type) and issubclass(schema, BaseModel) else None


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under the names of the HTTP API."""
    fields = {name: value for name, value in options.items() if value is not None}
    schema, outputs = fields.pop("schema", None), dict[str, Any]()
    if schema is not None:
        model = parsed_as(options)
        outputs["json"] = schema if model is None else model.model_json_schema()
    outputs |= {name: fields.pop(name) for name in ("regex", "choice", "grammar") if name in fields}
    if outputs:
        fields["structured_outputs"] = outputs
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(key): value for key, value in fields["logit_bias"].items()}
    return fields


def _parsed(schema: Any, body: dict[str, Any]) -> Any:
    if body.get("stream"):
        raise RequestError("Use stream() or stream_chat().", param="stream", code="invalid_value")
    # JSON turns tuples and other libraries' numbers into plain values.
    fields, unknown = parse(schema, json.loads(json.dumps(body, default=_plain)))
    if unknown:
        warnings.warn(f"options without effect: {', '.join(unknown)}", stacklevel=3)
    return fields


def _plain(value: Any) -> Any:
    """Convert a number or array of another library to Python's types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise RequestError(
        f"A {type(value).__name__} cannot be the value of an option.", code="invalid_type"
    )


def _finished(spec: Generation, request: Request, options: Mapping[str, Any]) -> Generation:
    """Set the fields that differ from HTTP's defaults, and warn of options without effect."""
    if ignored := ignored_fields(request.scope):
        warnings.warn(f"options without effect: {', '.join(ignored)}", stacklevel=3)
    if options.get("max_tokens") is None:
        spec = replace(spec, max_tokens=None)
    return replace(spec, token_ids=True)


def _request() -> Request:
    """Return a request without headers, on which schemas record ignored fields."""
    return Request({"type": "http", "method": "POST", "path": "/", "headers": []})
