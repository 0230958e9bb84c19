"""OpenAI's `/v1/embeddings`: a vector for each text or list of token ids.

The schema is https://platform.openai.com/docs/api-reference/embeddings.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.api.shared.context import Context, ServerContext, until_gone
from quire.api.shared.numbers import Integer
from quire.api.shared.pieces import Array, compact, pieces, whole
from quire.api.shared.prompt_fields import Input, prompts_of
from quire.api.shared.vector_fields import VectorFields, counted
from quire.core.errors import RequestError
from quire.core.request import Embed, PoolingKind
from quire.serving.generation import Prepared
from quire.serving.vectors import embed_task, shortened


class EmbeddingRequest(VectorFields):
    """The body: OpenAI's fields, and those of vLLM and sentence-transformers."""

    texts_field = "input"

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = Field(default=None, ge=1, le=1 << 20)
    pooling: PoolingKind | None = Field(
        default=None, description="default: as in the model's files, else mean"
    )
    normalize: bool | None = Field(
        default=None, description="scale vectors to length one; default: as in the model's files"
    )
    prompt_name: str | None = Field(
        default=None, description="the name of the model's prompt that is put before each text"
    )


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """A prepared request and the settings of its answer."""

    prepared: Prepared
    task: Embed
    dimensions: int | None
    packed: bool


async def _read(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, EmbeddingRequest)
    spec, pooling = fields.generation(context), context.service.vectors.pooling
    task = embed_task(pooling, fields.pooling, normalized=fields.normalize)
    before = pooling.prompt(fields.prompt_name)
    prompts = prompts_of(fields.input)
    if not prompts:
        raise RequestError("'input' is empty.", param="input", code="invalid_value")
    texts = (pooling.text(each, before) if isinstance(each, str) else each for each in prompts)
    prepared = await context.prepare(replace(spec, prompts=tuple(texts)))
    return _ReadRequest(
        prepared, task, dimensions=fields.dimensions, packed=fields.encoding_format == "base64"
    )


class Embeddings:
    """The endpoint of embeddings."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/embeddings`."""
        context, asked = await self._server.read(request, _read)
        vectors, task = context.service.vectors, asked.task
        work = vectors.compute(context.owned(request, asked.prepared), task)
        found = await until_gone(request.receive, work)
        size = len(found[0].values)
        if asked.dimensions is not None and asked.dimensions > size:
            raise RequestError(
                f"'dimensions' is {asked.dimensions}, but this model's vectors have only {size}.",
                param="dimensions",
                code="invalid_value",
            )
        data = (
            {
                "object": "embedding",
                "index": index,
                "embedding": _written(
                    shortened(each.values, asked.dimensions, normalized=task.normalized),
                    packed=asked.packed,
                ),
            }
            for index, each in enumerate(found)
        )
        tokens = sum(each.prompt_tokens for each in found)
        cached = sum(each.cached_tokens for each in found)
        body: dict[str, Any] = {
            "object": "list",
            "data": Array(data),
            "model": context.answering(asked.prepared),
            "usage": counted(request, tokens, cached),
            "pooling": {
                "type": task.pooling,
                "normalized": task.normalized,
                "trained": vectors.pooling.trained,
            },
        }
        return await whole(pieces(body), {})


def _written(values: Sequence[float], *, packed: bool) -> Any:
    """Return a vector as JSON numbers, or as base64 of little-endian float32."""
    if packed:
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return Array([compact(list(values))[1:-1]])
