"""What every endpoint is given, and the steps that all of them begin with."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request

from quire.api.access import note_ignored
from quire.api.auth import caller_of
from quire.api.limits import Slots, check_count, check_headers, read_body
from quire.api.metrics import CallerMetrics
from quire.api.schema import (
    DecodingFields,
    GenerationFields,
    Wire,
    check_stream_options,
    nucleus,
    parse,
    parse_json,
)
from quire.cache.formats.choose import choose_format
from quire.config import ServerConfig
from quire.core.kv_format import KVFormat
from quire.engine.runs import Run
from quire.engine.service import Generation, Service
from quire.errors import NotFound, RequestError
from quire.request import SamplingParams

BITS_HEADER = "x-quire-kv-bits"
SCHEME_HEADER = "x-quire-kv-scheme"
"""For clients whose SDK drops fields that it does not know."""

Parsed = TypeVar("Parsed", bound=Wire)
_IN_THREAD = 1 << 18  # bytes of a body from which reading it would hold up streams


@dataclass(frozen=True, slots=True)
class Context:
    """The served model and the operator's settings."""

    service: Service
    config: ServerConfig
    slots: Slots
    metrics: CallerMetrics

    async def start(self, request: Request, spec: Generation) -> Run:
        """Queues a generation for whoever asks.

        Raises:
            RequestError: it cannot be served; nothing has been queued.
            EngineFailure: the engine cannot go on.
        """
        caller = caller_of(request.scope)
        salt = spec.cache_salt if self.config.share_prefixes else caller + spec.cache_salt
        return await self.service.start(replace(spec, caller=caller, cache_salt=salt))

    async def read(
        self,
        request: Request,
        schema: type[Parsed],
        decode: Callable[[bytes], object] = parse_json,
    ) -> Parsed:
        """The request's body, validated; `decode` reads its JSON.

        The client is told of fields that pass without effect.

        Raises:
            RequestError: too large, not JSON, or not as the schema wants it.
        """
        check_headers(request)
        body = await read_body(request, self.config.max_body_bytes)
        if len(body) > _IN_THREAD:
            payload = await asyncio.to_thread(decode, body)
        else:
            payload = decode(body)
        fields, unknown = parse(schema, payload, strict_fields=self.config.strict_fields)
        note_ignored(request.scope, unknown)
        return fields

    def check_model(self, name: str | None) -> None:
        """Raises `NotFound` for a model that is not served; None means the one that is."""
        served = self.service.name
        if name is not None and name != served and name not in self.config.also_named:
            raise NotFound(
                f"The model '{name}' is not served here; '{served}' is.",
                param="model",
                code="model_not_found",
            )

    def kv_format(
        self, bits: float | str | None, scheme: str | None, headers: Mapping[str, str]
    ) -> KVFormat | None:
        """The KV format that a request asks for, by its fields or else by its headers.

        Raises:
            RequestError: it is not offered.
        """
        return choose_format(
            self.service.info.kv_formats,
            bits if bits is not None else headers.get(BITS_HEADER),
            scheme if scheme is not None else headers.get(SCHEME_HEADER),
        )

    def check_messages(self, count: int) -> None:
        """Raises `RequestError` for more messages than the operator allows."""
        check_count(count, self.config.max_messages, "messages")


def common_fields(
    context: Context,
    fields: GenerationFields,
    headers: Mapping[str, str],
    *,
    logprobs: int | None,
) -> dict[str, Any]:
    """The parts of a `Generation` that OpenAI's two generating endpoints spell alike.

    Raises:
        RequestError: a value that only this server's model or settings rule out.
    """
    context.check_model(fields.model)
    check_stream_options(fields.stream_options, stream=fields.stream)
    return {
        "n": fields.n or 1,
        "stops": fields.stops(),
        **decoding(context, fields, headers, logprobs=logprobs),
    }


def decoding(
    context: Context,
    fields: DecodingFields,
    headers: Mapping[str, str],
    *,
    logprobs: int | None = None,
) -> dict[str, Any]:
    """The parts of a `Generation` that every endpoint spells alike.

    Raises:
        RequestError: a value that only this server's model or settings rule out.
    """
    return {
        "sampling": _sampling(fields, context.service, logprobs),
        "stop_token_ids": frozenset(fields.stop_token_ids or ()),
        "ignore_eos": fields.ignore_eos is True,
        "kv_format": context.kv_format(fields.kv_bits, fields.kv_scheme, headers),
        "cache_salt": fields.cache_salt or "",
    }


def _sampling(fields: DecodingFields, service: Service, logprobs: int | None) -> SamplingParams:
    """Sampling parameters; what is left out has the server's default, and a seed of its own.

    Raises:
        RequestError: a bias is for no token.
    """
    named = {
        "temperature": fields.temperature,
        "top_p": None if fields.top_p is None else nucleus(fields.top_p),
        "top_k": None if fields.top_k is None else max(0, fields.top_k),
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    return replace(
        service.sampling,
        **given,
        logit_bias=_logit_bias(fields.logit_bias or {}, service.info.vocab_size),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed % 2**63,
        logprobs=logprobs,
    )


def _logit_bias(biases: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Biases by token id.

    Raises:
        RequestError: a key that is not the id of a token.
    """
    pairs = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary):
            raise RequestError(
                f"'logit_bias' has the key '{key[:40]}', which is not the id of one of this "
                f"model's {vocabulary} tokens.",
                param="logit_bias",
                code="invalid_value",
            )
        pairs.append((int(key), bias))
    return tuple(pairs)
