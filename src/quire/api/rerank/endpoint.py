"""Ranks documents by how well they answer a query.

`/v1/rerank` has the fields of https://docs.cohere.com/reference/rerank and
https://jina.ai/reranker; `/v1/score` has vLLM's.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.api.shared.context import Context, ServerContext, until_gone
from quire.api.shared.numbers import Integer
from quire.api.shared.schema import History, TextOrList
from quire.api.shared.vector_fields import VectorFields, counted
from quire.core.errors import RequestError
from quire.serving.ranking import Ranked, Ranking, prepare_ranking, ranked

_MOST_DOCUMENTS = 2048


class Document(History):
    """A document that is an object; its text alone is read."""

    text: str


DocumentOrText = Annotated[
    Annotated[str, Tag("@text")] | Annotated[Document, Tag("@object")],
    Discriminator(lambda value: "@text" if isinstance(value, str) else "@object"),
]


class RerankRequest(VectorFields):
    """The fields of Cohere and Jina."""

    texts_field = "documents"

    query: str = Field(min_length=1)
    documents: list[DocumentOrText] = Field(min_length=1, max_length=_MOST_DOCUMENTS)
    top_n: Integer | None = Field(default=None, ge=1)
    return_documents: bool | None = None
    max_tokens_per_doc: Integer | None = Field(default=None, ge=1)
    instruction: str | None = Field(
        default=None,
        description="instruction for a model that judges by its chat template: what makes a "
        "document relevant",
    )

    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(VectorFields):
    """The fields of vLLM: one text against each of many, or two lists pair by pair."""

    texts_field = "text_2"

    text_1: TextOrList[str]
    text_2: TextOrList[str]
    instruction: str | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs to score.

        Raises:
            RequestError: the lists do not fit each other.
        """
        one = [self.text_1] if isinstance(self.text_1, str) else list(self.text_1)
        other = [self.text_2] if isinstance(self.text_2, str) else list(self.text_2)
        if len(one) == 1:
            one *= len(other)
        if not other or len(one) != len(other) or len(one) > _MOST_DOCUMENTS:
            raise RequestError(
                f"'text_1' has {len(one)} texts and 'text_2' {len(other)}: give one and a list, or "
                f"two lists of one length, of at most {_MOST_DOCUMENTS}.",
                param="text_2",
                code="invalid_value",
            )
        return list(zip(one, other, strict=True))


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """A prepared request and the settings of its answer.

    Attributes:
        documents: texts of the documents, if they are returned.
    """

    ranking: Ranking
    top_n: int | None = None
    documents: list[str] | None = None


async def _read_rerank(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, RerankRequest)
    texts = fields.texts()
    cut = [_cut(context, each, fields.max_tokens_per_doc) for each in texts]
    pairs = [(fields.query, each) for each in cut]
    ranking = await _prepared(context, fields, pairs=pairs, instruction=fields.instruction)
    return _ReadRequest(ranking, fields.top_n, texts if fields.return_documents else None)


async def _read_score(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, ScoreRequest)
    return _ReadRequest(
        await _prepared(context, fields, pairs=fields.pairs(), instruction=fields.instruction)
    )


async def _prepared(
    context: Context, fields: VectorFields, pairs: list[tuple[str, str]], instruction: str | None
) -> Ranking:
    return await prepare_ranking(
        context.service,
        pairs,
        instruction=instruction,
        spec=fields.generation(context),
        light=context.jobs is not None,
    )


def _cut(context: Context, text: str, tokens: int | None) -> str:
    """Return the start of a text, at most so many tokens."""
    if tokens is None:
        return text
    encode, decode = context.service.prompts.encode, context.service.tokenizer.decode
    ids = encode(text, "documents", add_special_tokens=False)
    return text if len(ids) <= tokens else decode(ids[:tokens])


class Rerank:
    """The endpoints of rerank and score."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def rerank(self, request: Request) -> Response:
        """Answer `POST /v1/rerank`, in the shapes of Cohere and Jina together."""
        context, asked = await self._server.read(request, _read_rerank)
        found = await _ranked(context, request, asked.ranking)
        order = sorted(range(len(found.scores)), key=lambda index: -found.scores[index])
        results: list[dict[str, Any]] = []
        for index in order[: asked.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": found.scores[index]}
            if asked.documents is not None:
                result["document"] = {"text": asked.documents[index]}
            results.append(result)
        usage = counted(request, found.prompt_tokens, found.cached_tokens)
        meta = {
            "api_version": {"version": "2"},
            "tokens": {"input_tokens": found.prompt_tokens, "output_tokens": 0},
        }
        return JSONResponse(
            {
                "id": uuid.uuid4().hex,
                "model": context.service.name,
                "method": asked.ranking.method,
                "results": results,
                "meta": meta,
                "usage": usage,
            }
        )

    async def score(self, request: Request) -> Response:
        """Answer `POST /v1/score`."""
        context, asked = await self._server.read(request, _read_score)
        found = await _ranked(context, request, asked.ranking)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(found.scores)
        ]
        return JSONResponse(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": context.service.name,
                "method": asked.ranking.method,
                "data": data,
                "usage": counted(request, found.prompt_tokens, found.cached_tokens),
            }
        )


async def _ranked(context: Context, request: Request, ranking: Ranking) -> Ranked:
    owned = replace(ranking, prepared=context.owned(request, ranking.prepared))
    return await until_gone(request.receive, ranked(context.service, owned))
